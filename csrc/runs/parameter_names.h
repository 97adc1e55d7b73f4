#pragma once

#include <string>

#include <shoestring/runs/training.h>

#include "optim/core/stored.h"

namespace shoestring::runs {

/// Adds to the metadata of an optimizer of a run the names of its parameters: a JSON list with those of each
/// group, and null for a parameter that is not among the tensors of the run. Python writes and reads them,
/// too.
void add_names(optim::detail::Stored& stored, const torch::optim::Optimizer& optimizer,
               const TrainingRun& run);

/// Gives the tensors of a file the places that their parameters have in the optimizer of a run, by their
/// names. A parameter of which one side has no name keeps its order. Raises c10::Error, which begins with
/// `where`, if the names differ.
void match_names(optim::detail::Stored& stored, const torch::optim::Optimizer& optimizer,
                 const TrainingRun& run, const std::string& where);

}  // namespace shoestring::runs
