#pragma once

#include <shoestring/checkpoint/checkpoint_sequence.h>

#include <cstdint>
#include <optional>

#include "command_line.h"
#include "options.h"

/// Reads the file of --plan, if there is one, and sets the options that the plan decides. Raises InputError
/// if the file is no plan, if the plan is for another batch size, if the programs cannot follow it, or if an
/// option is given that it decides.
void follow_plan(const CommandLine& line, LoopOptions& options);

/// Returns the plan for the steps of Forward: the embedding, `layers` decoder layers, the norm and the loss.
/// Returns nullopt without --plan. Raises InputError if the plan is of a model with other layers.
std::optional<shoestring::SequencePlan> planned_layers(const LoopOptions& options, int64_t layers);

/// Returns whether a plan moves activations to the host.
bool offloads(const shoestring::SequencePlan& plan);
