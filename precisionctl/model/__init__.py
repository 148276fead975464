"""What a checkpoint says of its model: sizes and switches, without any weight. (`trainer/model/` computes one.)

In the order in which they are best read, which is the one in which they import one another:

text_config.py      which part of a config.json describes the text model
model_parts.py      experts, latent attention and others that some models have; what is a size
recurrent_parts.py  parts with a state that passes from token to token: delta nets, short convolutions, mixers
sparse_parts.py     attention to chosen keys
model_fields.py     ModelFields: all sizes and switches, in Megatron's words
model_layers.py     ModelLayers: the same, and what each layer has
model_shape.py      ModelShape: the same, checked, and what follows; the one that everything else uses
untabled_model.py   UntabledModel: a model of which none of this is known
same_model.py       do two of them describe the same model?
"""
