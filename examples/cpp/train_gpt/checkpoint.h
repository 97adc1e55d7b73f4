#pragma once

// Checkpoints of a training run, as safetensors files.

#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <string>

#include "optimizers.h"

/// Options and properties of the data, by name, that must be equal for a run to be resumed bit for bit.
using Fingerprint = std::map<std::string, std::string>;

/// Returns whether the folder has a training checkpoint.
bool has_checkpoint(const std::string& folder);

/// Removes the temporary files in the folder that a process was still writing when it was killed.
void remove_unfinished(const std::string& folder);

/// Writes the weights, the optimizer state and the scale of the loss after `step` steps to one safetensors
/// file in `folder`. If the process is killed, the file is either complete or absent. Removes all but the
/// newest two checkpoints.
void save_checkpoint(const std::string& folder, int64_t step, const torch::nn::Module& model,
                     const Optimizers& optimizers, const Fingerprint& fingerprint);

/// Restores the newest valid checkpoint in `folder` and returns its number of steps. Raises InputError if
/// there is no valid checkpoint, or if the checkpoint belongs to a run with other options.
int64_t load_checkpoint(const std::string& folder, const torch::nn::Module& model, Optimizers& optimizers,
                        const Fingerprint& fingerprint);

/// Writes a model directory in Hugging Face's format: config.json and model.safetensors.
void save_model(const std::string& folder, const torch::nn::Module& model, const std::string& config);
