"""The console: static pages at /console, and a stream of live figures for them."""
