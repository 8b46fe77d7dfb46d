"""What ``hfkv eval`` measures; a module of its own, so that the command line can name the parts without torch."""

PARTS = {
    "decoding": "perplexity, KL and top-1 agreement over a given text",
    "prefix": "how long free greedy decoding writes the same",
    "layers": "error of keys, values and attention output, layer by layer",
    "needles": "a number hidden in a long text",
    "facts": "sixteen questions with four answers each",
    "refusals": "harmless prompts that are refused or not",
}
