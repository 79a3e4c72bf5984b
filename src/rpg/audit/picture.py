def svg(report): return ""
