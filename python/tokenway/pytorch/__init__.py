"""All modules that cannot be imported without PyTorch: gradients, registered ops, the layer.

Import `tokenway.autograd`, `tokenway.experts`, `tokenway.nn` and `tokenway.ops`, which say what is public here. Nothing
else of the product but `integrations` imports this folder, so that `import tokenway` needs no PyTorch.
"""
