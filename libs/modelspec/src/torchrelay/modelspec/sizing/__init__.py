"""The devices that a model needs: its footprint, the times of its steps on a device, and what each device offers."""
