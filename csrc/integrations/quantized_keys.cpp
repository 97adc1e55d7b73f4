#include "integrations/quantized_keys.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <map>

#include <ATen/Functions.h>
#include <nlohmann/json.hpp>

#include "files/read_file.h"
#include "files/safetensors_format.h"
#include "quantization/packed.h"

namespace shoestring::integrations {
namespace {

using at::Tensor;
using files::quote;
using Json = nlohmann::json;

// Endings of the tensor key that describes a 4-bit weight, by its quant_type.
const std::map<std::string, std::string> kStates = {{"nf4", ".quant_state.bitsandbytes__nf4"},
                                                    {"fp4", ".quant_state.bitsandbytes__fp4"},
                                                    {"int4", ".quant_state.shoestring__int4"}};
// maximum size of a JSON description in bytes; real ones have about 250
constexpr int64_t kLongestState = 4096;

struct TypeName {
  const char* name;
  at::ScalarType type;
};
constexpr TypeName kTypes[] = {{"float32", at::kFloat}, {"bfloat16", at::kBFloat16}, {"float16", at::kHalf}};

template <class... Parts>
[[noreturn]] void refuse(const files::SafetensorsFiles& files, const std::string& name,
                         const Parts&... parts) {
  TORCH_CHECK_VALUE(false, "load_model: ", files.file(name).path(), ": ", quote(name), ": ", parts...);
}

void require(const files::SafetensorsFiles& files, const std::string& weight, const std::string& name,
             at::ScalarType dtype, int64_t count) {
  if (!files.contains(name)) refuse(files, weight, "expected ", quote(name), " beside it, received none");
  const auto& entry = files.entry(name);
  const int64_t received = (entry.end - entry.begin) / static_cast<int64_t>(c10::elementSize(entry.dtype));
  if (entry.dtype != dtype || received != count) {
    refuse(files, name, "expected ", count, " elements of ", dtype, ", received ", received, " of ",
           entry.dtype);
  }
}

// Reads the JSON description of a quantised 4-bit weight. Raises unless it has every required field with the
// right type.
Json read_state(const files::SafetensorsFiles& files, const std::string& name) {
  const auto& entry = files.entry(name);
  if (entry.dtype != at::kByte || entry.end - entry.begin > kLongestState) {
    refuse(files, name, "expected at most ", kLongestState, " bytes of JSON, received ",
           entry.end - entry.begin, " bytes of ", entry.dtype);
  }
  const Tensor text = files.file(name).load(name);
  const auto* begin = text.const_data_ptr<uint8_t>();
  const std::string where = "load_model: " + files.file(name).path() + ": " + quote(name);
  Json state = files::parse_json(where + ": expected JSON with quant_type, blocksize, dtype and shape",
                                 std::string(begin, begin + text.numel()));
  const auto has = [&](const char* field, bool (Json::*is)() const noexcept) {
    return state.is_object() && state.contains(field) && (state[field].*is)();
  };
  const bool whole = has("quant_type", &Json::is_string) && has("blocksize", &Json::is_number_integer) &&
                     has("dtype", &Json::is_string) && has("shape", &Json::is_array);
  const bool nested = state.is_object() && state.contains("nested_offset");
  if (!whole || (nested && !(has("nested_offset", &Json::is_number) &&
                             has("nested_blocksize", &Json::is_number_integer)))) {
    refuse(files, name,
           "expected JSON with quant_type, blocksize, dtype, shape, and nested_offset and nested_blocksize "
           "of nested "
           "scales, received something else");
  }
  return state;
}

std::optional<QuantizedKeys> find_int8(const files::SafetensorsFiles& files, const std::string& prefix,
                                       int64_t rows, int64_t columns) {
  const std::string weight = prefix + "weight", scales = prefix + "SCB", format = prefix + "weight_format";
  if (!files.contains(scales)) return std::nullopt;
  if (!files.contains(weight)) refuse(files, scales, "expected ", quote(weight), " beside it, received none");
  const auto& entry = files.entry(weight);
  if (entry.dtype != at::kChar || entry.shape != std::vector<int64_t>{rows, columns}) {
    refuse(files, weight, "expected shape [", rows, ", ", columns, "] of int8, received ",
           at::IntArrayRef(entry.shape), " of ", entry.dtype);
  }
  require(files, weight, scales, at::kFloat, rows);
  QuantizedKeys keys{{weight, scales}, QuantizeOptions().quant_type("int8").block_size(columns), {}, {}};
  if (files.contains(format)) {
    require(files, weight, format, at::kByte, 1);
    const int order = *files.file(format).load(format).const_data_ptr<uint8_t>();
    if (order != 0) refuse(files, format, "expected 0 (rows in plain order), received ", order);
    keys.names.push_back(format);
  }
  return keys;
}

// Formats a float as Python's repr() does: with the fewest digits from which the same float can be read back.
std::string python_number(double value) {
  char digits[32];
  const auto scientific = std::to_chars(digits, digits + sizeof digits, value, std::chars_format::scientific);
  std::string text(digits, scientific.ptr);
  const int exponent = std::stoi(text.substr(text.find('e') + 1));
  if (exponent < -4 || exponent >= 16) return text;
  const auto fixed = std::to_chars(digits, digits + sizeof digits, value, std::chars_format::fixed);
  text.assign(digits, fixed.ptr);
  return text.find('.') == std::string::npos ? text + ".0" : text;
}

Tensor bytes_of(const std::string& text) {
  Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

}  // namespace

std::optional<QuantizedKeys> find_quantized(const files::SafetensorsFiles& files, const std::string& prefix,
                                            int64_t rows, int64_t columns) {
  if (auto keys = find_int8(files, prefix, rows, columns)) return keys;
  const std::string weight = prefix + "weight";
  std::string name, type;
  for (const auto& [known, state] : kStates) {
    if (files.contains(weight + state)) name = weight + state, type = known;
  }
  if (name.empty()) return std::nullopt;
  const Json state = read_state(files, name);
  const std::string dtype = state["dtype"].get<std::string>();
  if (state["quant_type"] != type)
    refuse(files, name, "quant_type: expected ", type, ", received ", state["quant_type"].dump());
  if (state["shape"] != Json{rows, columns}) {
    refuse(files, name, "expected shape [", rows, ", ", columns, "], received ", state["shape"].dump());
  }
  QuantizedKeys keys{{weight, weight + ".absmax", weight + ".quant_map", name}, {}, {}, {}};
  for (const auto& known : kTypes) {
    if (dtype == known.name) keys.dtype = known.type;
  }
  if (!keys.dtype)
    refuse(files, name, "dtype: expected float32, bfloat16 or float16, received ", quote(dtype));
  const auto block = state["blocksize"].get<int64_t>();
  quantization::check_block_size("load_model", block);
  keys.options.quant_type(type).block_size(block);

  const int64_t count = rows * columns, blocks = (count + block - 1) / block, packed = (count + 1) / 2;
  if (!files.contains(weight)) refuse(files, name, "expected ", quote(weight), " beside it, received none");
  // The packed codes may have any dtype, because bitsandbytes may store their bytes e.g. as bf16.
  const auto& entry = files.entry(weight);
  if (entry.end - entry.begin != packed) {
    refuse(files, weight, "expected ", packed, " bytes, received ", entry.end - entry.begin);
  }
  const bool nested = state.contains("nested_offset");
  if (nested && type == "int4") refuse(files, name, "nested_offset: expected none with int4, received one");
  require(files, weight, weight + ".absmax",
          type == "int4" ? at::kInt
          : nested       ? at::kByte
                         : at::kFloat,
          blocks);
  require(files, weight, weight + ".quant_map", at::kFloat, 16);
  const Tensor values = files.file(keys.names[2]).load(keys.names[2]);
  const auto& book = quantization::codebook("load_model", type).value;
  if (!std::equal(std::begin(book), std::end(book), values.const_data_ptr<float>())) {
    refuse(files, keys.names[2], "expected the ", type, " values, received others");
  }
  if (nested) {
    if (state["nested_blocksize"] != quantization::kNestedBlock) {
      refuse(files, name, "nested_blocksize: expected ", quantization::kNestedBlock, ", received ",
             state["nested_blocksize"].dump());
    }
    keys.offset = static_cast<float>(state["nested_offset"].get<double>());
    if (!std::isfinite(*keys.offset))
      refuse(files, name, "nested_offset: expected a finite number, received another");
    require(files, weight, weight + ".nested_absmax", at::kFloat,
            (blocks + quantization::kNestedBlock - 1) / quantization::kNestedBlock);
    require(files, weight, weight + ".nested_quant_map", at::kFloat, 256);
    keys.names.insert(keys.names.end(), {weight + ".nested_absmax", weight + ".nested_quant_map"});
  }
  return keys;
}

QuantizedParts read_quantized(const files::SafetensorsFiles& files, const std::string& prefix,
                              const QuantizedKeys& keys) {
  const auto load = [&](const std::string& name) { return files.file(name).load(name); };
  const std::string weight = prefix + "weight";
  if (keys.options.quant_type() == "int8") return {load(weight), load(prefix + "SCB").flatten(), Tensor()};
  QuantizedParts parts{load(weight).view(at::kByte).flatten(), load(weight + ".absmax").flatten(), Tensor()};
  if (keys.offset) {
    parts.second = at::cat({at::full({1}, *keys.offset), load(weight + ".nested_quant_map").flatten(),
                            load(weight + ".nested_absmax").flatten()});
  }
  return parts;
}

void add_quantized(TensorDict& tensors, const std::string& prefix, const nn::QuantizedLinearImpl& layer) {
  const std::string weight = prefix + "weight", type = layer.options.quantize().quant_type();
  if (type == "int8") {
    tensors.insert(weight, layer.packed);
    tensors.insert(prefix + "SCB", layer.absmax);
    tensors.insert(prefix + "weight_format", at::zeros({}, at::kByte));
    return;
  }
  std::string dtype;
  for (const auto& known : kTypes) {
    if (layer.dtype == known.type) dtype = known.name;
  }
  std::string state =
      c10::str("{\"quant_type\": \"", type, "\", \"blocksize\": ", layer.options.quantize().block_size(),
               ", \"dtype\": \"", dtype, "\", \"shape\": [", layer.options.out_features(), ", ",
               layer.options.in_features(), "]");
  tensors.insert(weight, layer.packed.view({-1, 1}));
  tensors.insert(weight + ".absmax", layer.absmax.flatten());
  tensors.insert(weight + ".quant_map", at::empty({16}));
  std::memcpy(tensors[weight + ".quant_map"].mutable_data_ptr(),
              quantization::codebook("save_model", type).value, 16 * sizeof(float));
  if (layer.nested.defined()) {
    const Tensor nested = layer.nested.cpu();
    tensors.insert(weight + ".nested_absmax", nested.slice(0, quantization::kNestedHead));
    tensors.insert(weight + ".nested_quant_map", nested.slice(0, 1, quantization::kNestedHead));
    state += ", \"nested_blocksize\": 256, \"nested_dtype\": \"float32\", \"nested_offset\": " +
             python_number(nested.const_data_ptr<float>()[0]);
  }
  tensors.insert(weight + kStates.at(type), bytes_of(state + "}"));
}

}  // namespace shoestring::integrations
