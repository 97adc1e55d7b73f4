// The functions of layers call their operators, which core/test_operator_cases.cpp compares with references.

#include "catch.h"

#include <torch/csrc/autograd/generated/variable_factories.h>

#include <shoestring/ops.h>

#include "operators.h"

using at::Tensor;
using Catch::Contains;

TEST_CASE("the functions of layers pass every argument to their operators", "[layers]") {
  const Tensor x = torch::randn({2, 5, 6, 16}), other = torch::randn({2, 5, 6, 16}),
               weight = torch::rand({16}), bias = torch::randn({16}), seed = torch::tensor({int64_t{5}});
  const auto same = [](const char* name, const std::vector<Tensor>& found, const NamedArguments& arguments) {
    CAPTURE(name);
    const auto expected = call(name, arguments);
    REQUIRE(found.size() == expected.size());
    for (size_t i = 0; i < found.size(); ++i) CHECK(at::equal(found[i], expected[i]));
  };
  const auto both = [](const std::tuple<Tensor, Tensor>& pair) {
    return std::vector<Tensor>{std::get<0>(pair), std::get<1>(pair)};
  };
  same("seeded_dropout", {shoestring::seeded_dropout(x, seed, 0.25)},
       {{"x", x}, {"seed", seed}, {"p", 0.25}});
  same("swiglu", {shoestring::swiglu(x, other)}, {{"gate", x}, {"up", other}});
  same("geglu", {shoestring::geglu(x, other, "tanh")}, {{"gate", x}, {"up", other}, {"approximate", "tanh"}});
  same("geglu", {shoestring::geglu(x, other)}, {{"gate", x}, {"up", other}});
  same("gelu", {shoestring::gelu(x, "tanh")}, {{"x", x}, {"approximate", "tanh"}});
  const NamedArguments affine{{"weight", weight}, {"bias", bias}, {"eps", 0.5}, {"out_dtype", at::kBFloat16}};
  same("layer_norm", {shoestring::layer_norm(x, weight, bias, 0.5, at::kBFloat16)}, with({{"x", x}}, affine));
  same("add_layer_norm", both(shoestring::add_layer_norm(x, other, weight, bias, 0.5, at::kBFloat16)),
       with({{"x", x}, {"residual", other}}, affine));
  const auto options = shoestring::RMSNormOptions(0.5).offset(1).upcast("gemma").out_dtype(at::kBFloat16);
  const NamedArguments scaled{
      {"weight", weight}, {"eps", 0.5}, {"offset", 1.0}, {"upcast", "gemma"}, {"out_dtype", at::kBFloat16}};
  same("rms_norm", {shoestring::rms_norm(x, weight, options)}, with({{"x", x}}, scaled));
  same("add_rms_norm", both(shoestring::add_rms_norm(x, other, weight, options)),
       with({{"x", x}, {"residual", other}}, scaled));
  const Tensor cos = torch::rand({9, 4}), sin = torch::rand({9, 4}),
               positions = torch::tensor({3, 0, 8, 8, 1, 4}, at::kLong), k_weight = torch::rand({16});
  const auto turn = shoestring::RopeOptions().rotary_dim(8).interleaved(true).position_ids(positions);
  same("rope",
       both(shoestring::rope(
           x, other, cos, sin,
           shoestring::RopeOptions(turn).q_weight(weight).k_weight(k_weight).eps(0.5).offset(1))),
       {{"q", x},
        {"k", other},
        {"cos", cos},
        {"sin", sin},
        {"rotary_dim", 8},
        {"interleaved", true},
        {"position_ids", positions},
        {"q_weight", weight},
        {"k_weight", k_weight},
        {"eps", 0.5},
        {"offset", 1.0}});
}

TEST_CASE("the functions of layers refuse what does not fit, in words", "[layers]") {
  const Tensor x = torch::randn({7, 45});
  CHECK_THROWS_WITH(shoestring::swiglu(x, x.narrow(0, 0, 3)), Contains("swiglu: gate: expected the shape"));
  CHECK_THROWS_WITH(shoestring::geglu(x, x, "erf"),
                    Contains("geglu: approximate: expected 'tanh' or 'none'"));
  CHECK_THROWS_WITH(shoestring::gelu(x, "erf"), Contains("gelu: approximate: expected 'tanh' or 'none'"));
  CHECK_THROWS_WITH(shoestring::layer_norm(x, torch::rand({3}), std::nullopt, 1e-5),
                    Contains("layer_norm: weight: expected (45)"));
  CHECK_THROWS_WITH(shoestring::add_layer_norm(x, torch::rand({3}), std::nullopt, std::nullopt, 1e-5),
                    Contains("layer_norm: residual: expected x's shape"));
}
