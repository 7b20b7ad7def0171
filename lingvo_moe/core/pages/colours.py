"""The colours of a plan's page by kind of memory and phase; core/pages/style.py has the rest of its style."""

COLOURS = """
:root {
  --weights: #35508f; --slots: #8299cc; --inputs: #9a938a; --weight_copies: #5d4a86; --activations: #23807f;
  --gradients: #74b9a8; --temporaries: #cf9436; --padding: #cdc6b8; --code: #6b655e;
  --forward: #23807f; --recompute: #8cc4bd; --backward: #35508f; --optimizer: #a98fc4;
  --network: #c9552f }
@media (prefers-color-scheme: dark) { :root {
  --weights: #7f9be0; --slots: #4c629f; --inputs: #8b857d; --weight_copies: #a68fd6; --activations: #4fb3ad;
  --gradients: #2f7a70; --temporaries: #dba84f; --padding: #4a4e52; --code: #a59e95;
  --forward: #4fb3ad; --recompute: #2b6f6c; --backward: #7f9be0; --optimizer: #9f86bd;
  --network: #e67c53 } }
"""
