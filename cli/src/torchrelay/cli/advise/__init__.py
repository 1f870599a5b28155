"""`torchrelay advise`: the changes of settings that would save most."""
