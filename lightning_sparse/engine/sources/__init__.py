"""DDP's communication hook and the hooks of gradients: where an engine's gradients come from."""
