#pragma once

// Checkpoints of a training run in a folder, as files of shoestring::save_training.

#include <shoestring/files/safetensors.h>
#include <shoestring/runs/training.h>

#include <string>

/// Returns whether the folder has a training checkpoint.
bool has_checkpoint(const std::string& folder);

/// Removes the temporary files in the folder that a process was still writing when it was killed.
void remove_unfinished(const std::string& folder);

/// Saves the run to one file in `folder`. If the process is killed, the file is either complete or absent.
/// Removes all but the newest two checkpoints.
void save_checkpoint(const std::string& folder, const shoestring::TrainingRun& run);

/// Restores the newest valid checkpoint in `folder`. Raises InputError, with the reason why the newest file
/// is refused, if there is no valid checkpoint of this run.
void load_checkpoint(const std::string& folder, shoestring::TrainingRun& run);

/// Writes a model directory in Hugging Face's format: config.json and model.safetensors.
void save_model(const std::string& folder, const shoestring::TensorDict& tensors, const std::string& config);
