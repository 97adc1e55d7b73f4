#pragma once

#include <string>

#include "model.h"

/// The shape of the Llama in a Hugging Face model directory, from its config.json. Raises InputError where
/// the file cannot be read, or describes something that model.h does not compute.
LlamaConfig read_config(const std::string& directory);
