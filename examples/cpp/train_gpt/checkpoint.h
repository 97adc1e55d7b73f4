#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <string>

/// What must be the same for a run to be continued bit for bit, by name.
using Fingerprint = std::map<std::string, std::string>;

/// True where the folder holds a checkpoint.
bool has_checkpoint(const std::string& folder);

/// Removes what a killed process left half-written in the folder.
void remove_unfinished(const std::string& folder);

/// Writes weights and optimizer state after `step` steps to one safetensors file in `folder`, complete or not
/// at all, and removes all but the newest two.
void save_checkpoint(const std::string& folder, int64_t step, const torch::nn::Module& model,
                     torch::optim::Optimizer& optimizer, const Fingerprint& fingerprint);

/// Restores the newest sound checkpoint of `folder` and returns its number of steps. Raises InputError where
/// there is none, or where it belongs to a run with other options.
int64_t load_checkpoint(const std::string& folder, const torch::nn::Module& model,
                        torch::optim::Optimizer& optimizer, const Fingerprint& fingerprint);

/// Writes a Hugging Face model directory: config.json and model.safetensors.
void save_model(const std::string& folder, const torch::nn::Module& model, const std::string& config);
