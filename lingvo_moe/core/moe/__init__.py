"""Mixture-of-experts layers: route, dispatch, compute, combine (paper sections 2.2 and 3.1)."""
