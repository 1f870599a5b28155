"""A burst of calls for a sleeping model, without and with live scaling."""
