// Reads and writes situations and plans as JSON.

#include <utility>

#include <shoestring/planning/plan_training.h>

#include "files/atomic_file.h"
#include "files/read_file.h"
#include "planning/check.h"
#include "planning/json_fields.h"

namespace shoestring {
namespace {

// A file or a text of JSON: what it is, its version, and the fields of a situation or a plan.
template <class T>
std::string write(const char* format, const T& value) {
  planning::Json json{{"format", format}, {"format_version", 1}};
  json.update(planning::to_json(value));
  return json.dump(1, ' ', false, planning::Json::error_handler_t::replace) + "\n";
}

template <class T>
T read(const char* format, const std::string& where, nlohmann::json json) {
  TORCH_CHECK_VALUE(json.is_object() && json.value("format", nlohmann::json()) == format, where,
                    ": expected JSON whose field \"format\" is \"", format, "\"");
  TORCH_CHECK_VALUE(json.value("format_version", nlohmann::json()) == 1, where,
                    ": expected format_version 1, received ",
                    json.value("format_version", nlohmann::json()).dump().substr(0, 40),
                    "; plan anew with this version of shoestring");
  json.erase("format");
  json.erase("format_version");
  T value;
  planning::from_json(json, value, where);
  planning::check(value, where);
  return value;
}

constexpr const char* kSituation = "shoestring.situation";
constexpr const char* kPlan = "shoestring.plan";

}  // namespace

std::string Situation::to_json() const { return write(kSituation, *this); }

Situation Situation::from_json(const std::string& text) {
  const std::string where = "plan_training: situation";
  return read<Situation>(kSituation, where, files::parse_json(where, text));
}

std::string TrainingPlan::to_json() const { return write(kPlan, *this); }

TrainingPlan TrainingPlan::from_json(const std::string& text) {
  const std::string where = "TrainingPlan: from_json";
  return read<TrainingPlan>(kPlan, where, files::parse_json(where, text));
}

void TrainingPlan::save(const std::string& path) const {
  const std::string text = to_json();
  files::AtomicFile file("TrainingPlan: save", path);
  file.write(text.data(), static_cast<int64_t>(text.size()));
  file.commit();
}

TrainingPlan TrainingPlan::load(const std::string& path) {
  const std::string caller = "TrainingPlan: load";
  const std::string where = caller + ": " + path;
  return read<TrainingPlan>(kPlan, where, files::read_json(caller, path, int64_t{1} << 26));
}

}  // namespace shoestring
