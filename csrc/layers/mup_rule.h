#pragma once

// The rule of muP: how learning rates and initial deviations change with the sizes of a parameter.

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <shoestring/nn/init.h>

namespace shoestring::nn::init {

/// Says which dimensions of a parameter are fan-out and fan-in.
enum class MupLayout : int64_t {
  kUnknown,
  kOutIn,  // (fan-out, fan-in, ...), as in linear layers
  kInOut,  // (fan-in, fan-out, ...), as in embeddings
};

/// A parameter under one of its names. Names of one tensor have the same number `tensor`.
struct MupRole {
  std::string name;
  MupLayout layout;
  std::vector<int64_t> sizes;
  int64_t tensor;
  bool trained;
};

/// The multipliers of roles[role]. has_fan_in: the fan-in differs from that of the base model.
struct MupScale {
  int64_t role;
  std::string kind;
  double lr, deviation;
  bool has_fan_in;
};

/// Returns the sizes of a parameter in the base model.
using MupBase = std::function<std::vector<int64_t>(const MupRole&)>;

/// Returns a base model by the sizes of its parameters. It must not outlive `sizes`.
MupBase base_by_name(const std::map<std::string, std::vector<int64_t>>& sizes);
/// Returns a base model whose dimensions have the sizes widths[size]. `argument` is the name of `widths` in
/// errors. The base must not outlive `widths`.
MupBase base_by_width(const std::map<int64_t, int64_t>& widths, const std::vector<MupRole>& roles,
                      const char* argument);

/// Returns the multipliers of each trained tensor, under its first name.
std::vector<MupScale> mup_scales(const std::vector<MupRole>& roles, const MupBase& base,
                                 const MupOptions& options);

}  // namespace shoestring::nn::init
