#pragma once

// Checks the values of situations and plans.

#include <cstddef>
#include <string>

#include <shoestring/planning/plan_training.h>

namespace shoestring::planning {

/// Raise ValueError, whose message begins with `where` and the path of the field, if a value is wrong.
void check(Situation situation, const std::string& where);
void check(TrainingPlan plan, const std::string& where);

/// Returns 0 for the freedom "exact", 1 for "rounding" and 2 for "method". Raises ValueError for other texts.
size_t degree(const std::string& freedom, const std::string& where);

/// Returns the beginning of a text from a file, for an error message of one line.
std::string shown(std::string text);

}  // namespace shoestring::planning
