"""step metrics, time shares, latency fits; imports engine.core/profile and common only; lowest"""
