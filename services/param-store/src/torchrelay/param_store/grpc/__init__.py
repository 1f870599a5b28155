"""RPCs of control.v1.ParamStore; may import everything but main/background_tasks"""
