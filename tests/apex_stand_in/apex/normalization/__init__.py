"""FusedLayerNorm and FusedRMSNorm are not used here, but the functions behind them."""
