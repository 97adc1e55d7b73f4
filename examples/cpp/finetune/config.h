#pragma once

#include <string>

#include "model.h"

/// Reads the shape of a Llama from config.json in a Hugging Face model directory. Raises InputError if the
/// file cannot be read, or if it describes a model that model.h does not implement.
LlamaConfig read_config(const std::string& directory);
