// Runs the cases that the Python tests of the operators declare (tests/python/operator_cases.py). The script
// tests/python/write_cases.py writes them to a file, with the exact results and the bounds of their errors.

#include "catch.h"

#include <algorithm>
#include <exception>
#include <filesystem>
#include <functional>
#include <map>

#include <torch/csrc/autograd/autograd.h>
#include <nlohmann/json.hpp>

#include <shoestring/files/safetensors.h>

#include "capabilities.h"
#include "operators.h"
#include "relative_error.h"

using at::Tensor;

namespace {

using Json = nlohmann::json;
using Loader = std::function<Tensor(const std::string& name)>;

// Returns an argument of a case with the type that the schema gives it. JSON holds tensors and dtypes by
// their names.
c10::IValue argument_value(const Json& value, const c10::Type& type, const Loader& load) {
  if (value.is_null()) return {};
  switch (type.kind()) {
    case c10::TypeKind::OptionalType:
      return argument_value(value, *type.castRaw<c10::OptionalType>()->getElementType(), load);
    case c10::TypeKind::ListType: {
      const auto element = type.castRaw<c10::ListType>()->getElementType();
      c10::impl::GenericList list(element);
      for (const Json& item : value) list.push_back(argument_value(item, *element, load));
      return list;
    }
    case c10::TypeKind::TensorType:
      return load(value.get<std::string>());
    case c10::TypeKind::StringType:
      return value.get<std::string>();
    case c10::TypeKind::FloatType:
      return value.get<double>();
    case c10::TypeKind::BoolType:
      return value.get<bool>();
    default:
      if (value.is_string()) return c10::getStringToDtypeMap().at(value.get<std::string>());
      return value.is_number_integer() ? c10::IValue(value.get<int64_t>()) : c10::IValue(value.get<double>());
  }
}

// Returns the results of a case, and the gradients of its leaves.
std::vector<Tensor> results_of_case(const Json& tested, const shoestring::SafetensorsFile& file) {
  std::map<std::string, Tensor> leaves;
  torch::autograd::variable_list inputs, roots, upstream;
  for (const std::string name : tested.at("leaves")) {
    inputs.push_back(file.load(name).set_requires_grad(true));
    leaves[name] = inputs.back();
  }
  const Loader load = [&](const std::string& name) {
    const auto leaf = leaves.find(name);
    return leaf == leaves.end() ? file.load(name) : leaf->second;
  };
  const std::string op = tested.at("operator");
  const c10::FunctionSchema& schema = find_operator(op).schema();
  NamedArguments arguments;
  for (const auto& [name, value] : tested.at("arguments").items()) {
    arguments.emplace_back(name, argument_value(value, *argument_of(schema, name).type(), load));
  }
  std::vector<Tensor> results = call(op, arguments);
  for (size_t i = 0; i < results.size(); ++i) {
    const Json& gradient = tested.at("results").at(i).at("upstream");
    CHECK(results[i].requires_grad() == !gradient.is_null());
    if (gradient.is_null()) continue;
    roots.push_back(results[i]);
    upstream.push_back(file.load(gradient));
  }
  if (inputs.empty()) return results;
  for (const Tensor& gradient : torch::autograd::grad(roots, inputs, upstream)) results.push_back(gradient);
  return results;
}

}  // namespace

TEST_CASE("operators pass the cases of the Python tests", "[operator_cases]") {
  const auto folder = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  const std::string path =
      folder / (is_emulated() ? "emulated_cases.safetensors" : "operator_cases.safetensors");
  INFO("scripts/test.sh and python tests/python/write_cases.py write this file: " << path);
  const shoestring::SafetensorsFile file(path);
  const Json cases = Json::parse(file.metadata().at("cases"));
  size_t ran = 0;
  for (const Json& tested : cases) {
    INFO(tested.at("operator").get<std::string>()
         << " " << tested.at("case").get<std::string>() << ", --seed=" << file.metadata().at("seed"));
    bool complete = true;
    for_each_capability([&](const char* capability) {
      CAPTURE(capability);
      std::vector<Tensor> results;
      std::vector<double> bounds;
      try {
        results = results_of_case(tested, file);
        bounds = tested.at("bounds").at(capability).get<std::vector<double>>();
      } catch (const std::exception& error) {
        FAIL_CHECK(error.what());
        complete = false;
        return;
      }
      CHECK(results.size() == bounds.size());
      for (size_t i = 0; i < std::min(results.size(), bounds.size()); ++i) {
        const Json& expected = tested["results"][i];
        INFO(expected["name"].get<std::string>());
        const Tensor exact = file.load(expected["exact"]);
        CHECK(results[i].scalar_type() == c10::getStringToDtypeMap().at(expected["dtype"]));
        CHECK(results[i].sizes() == exact.sizes());
        if (results[i].sizes() == exact.sizes()) CHECK(relative_error(results[i], exact) <= bounds[i]);
      }
    });
    ran += complete;
  }
  CHECK(ran > 0);
  CHECK(ran == cases.size());
}

TEST_CASE("a call by name refuses operators and arguments that do not exist", "[operator_cases]") {
  CHECK_THROWS_WITH(call("absent", {}), Catch::Contains("shoestring::absent"));
  CHECK_THROWS_WITH(call("swiglu", {{"gates", at::ones({2})}}),
                    Catch::Contains("shoestring::swiglu: expected the name of an argument, received gates"));
}
