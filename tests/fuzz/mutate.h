#pragma once

// Damages files as mutate.py does. In binary files it flips bits, changes lengths and cuts ends. In JSON it
// changes types, numbers, nesting and names.

#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

namespace fuzz {

using Json = nlohmann::ordered_json;
using Random = std::mt19937_64;

inline size_t below(Random& rng, size_t n) { return n == 0 ? 0 : rng() % n; }

inline std::string mutate_bytes(std::string data, Random& rng) {
  for (size_t n = 1 + below(rng, 2); n > 0; --n) {
    const size_t at = below(rng, data.size() + 1), length = below(rng, data.size() - at + 1);
    switch (below(rng, 5)) {
      case 0:
        for (size_t i = 1 + below(rng, 8); i > 0 && !data.empty(); --i)
          data[below(rng, data.size())] ^= char(1 << below(rng, 8));
        break;
      case 1:
        data.erase(at, length);
        break;
      case 2:
        data.resize(at);
        break;
      case 3:
        data.insert(at, data.substr(at, 1 + below(rng, 64)));
        break;
      default: {
        const uint64_t values[] = {0,          1,         data.size(), data.size() - 8,  1u << 31,
                                   UINT32_MAX, INT64_MAX, UINT64_MAX,  rng() % (1 << 20)};
        const uint64_t value = values[below(rng, std::size(values))];
        const size_t places[] = {0, 0, 8, 12, 16, at}, place = places[below(rng, 6)],
                     width = below(rng, 2) ? 8 : 4;
        if (place + width <= data.size()) std::memcpy(data.data() + place, &value, width);
      }
    }
  }
  return data;
}

inline Json another(const Json& value, Random& rng) {
  static const std::vector<Json> values = {0,
                                           -1,
                                           1,
                                           1ull << 31,
                                           1ull << 32,
                                           INT64_MAX,
                                           UINT64_MAX,
                                           INT64_MIN,
                                           1e300,
                                           -1e300,
                                           0.5,
                                           1e-320,
                                           nullptr,
                                           true,
                                           false,
                                           Json::array(),
                                           Json::object(),
                                           "",
                                           std::string("\0", 1),
                                           std::string(5000, 'x'),
                                           "\xc3\xa9\n",
                                           "../x",
                                           "(a+)+$",
                                           std::string(100000, '('),
                                           ".*.*.*.*.*.*.*.*x",
                                           "((a{1,200}){1,200}){1,200}",
                                           "[[:alpha:]]",
                                           "(?<=a|bc)x",
                                           "nf4",
                                           "F32",
                                           "BF16"};
  if (below(rng, 4) == 0) return Json::array({value});
  if (value.is_number_integer() && below(rng, 2)) return value.get<uint64_t>() + rng() % 3 - 1;
  if (value.is_string() && below(rng, 3) == 0) return value.get<std::string>() + "x";
  return values[below(rng, values.size())];
}

inline std::string mutate_json(const std::string& text, Random& rng) {
  if (below(rng, 12) == 0) return std::string(below(rng, 2) ? 1000 : 1000000, below(rng, 2) ? '[' : '{');
  Json tree = below(rng, 8) == 0 ? Json() : Json::parse(text, nullptr, false);
  if (tree.is_discarded() || tree.is_null()) return mutate_bytes(text, rng);
  for (size_t n = 1 + below(rng, 3); n > 0; --n) {
    std::vector<Json*> containers, waiting{&tree};
    while (!waiting.empty()) {
      Json* each = waiting.back();
      waiting.pop_back();
      if (!each->is_structured() || each->empty()) continue;
      containers.push_back(each);
      for (auto& child : *each) waiting.push_back(&child);
    }
    if (containers.empty()) return another(tree, rng).dump();
    Json& inside = *containers[below(rng, containers.size())];
    auto place = inside.begin();
    std::advance(place, below(rng, inside.size()));
    switch (below(rng, 5)) {
      case 0:
        inside.erase(place);
        break;
      case 1: {
        Json nested = *place;
        for (size_t depth = below(rng, 2) ? 70 : 400; depth > 0; --depth)
          nested = Json::array({std::move(nested)});
        *place = std::move(nested);
        break;
      }
      default:
        *place = another(*place, rng);
    }
  }
  std::string result = tree.dump(-1, ' ', below(rng, 2) == 0, Json::error_handler_t::replace);
  if (below(rng, 12) == 0 && result.size() > 2 && result[0] == '{')
    result.insert(1, result.substr(1, result.size() - 2) + ",");
  return result;
}

inline std::string mutate_safetensors(const std::string& data, Random& rng) {
  uint64_t size = 0;
  if (data.size() >= 8) std::memcpy(&size, data.data(), 8);
  if (below(rng, 5) < 2 || size > data.size() - 8) return mutate_bytes(data, rng);
  std::string header = data.substr(8, size);
  if (below(rng, 3) == 0) {  // damage JSON that is stored as text in the metadata of a safetensors header
    Json tree = Json::parse(header, nullptr, false);
    for (auto& item : tree["__metadata__"]) {
      const auto text = item.get<std::string>();
      if (!text.empty() && (text[0] == '[' || text[0] == '{')) item = mutate_json(text, rng);
    }
    header = tree.dump(-1, ' ', false, Json::error_handler_t::replace);
  } else {
    header = mutate_json(header, rng);
  }
  uint64_t length = header.size();
  if (below(rng, 10) == 0) length += rng() % 3 - 1;
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + data.substr(8 + size);
}

}  // namespace fuzz
