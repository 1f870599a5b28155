"""The RPCs of control.v1.ParamStore and their messages."""
