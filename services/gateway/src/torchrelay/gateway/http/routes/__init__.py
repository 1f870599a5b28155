"""The tenants' REST door, all but the token path: tenants, keys, uploads, models, usage, bills, prices."""
