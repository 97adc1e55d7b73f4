// Writes the report of a monitor as a table and as JSON.

#include "runs/monitor_text.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>

#include <nlohmann/json.hpp>

#include "runs/monitor_fields.h"

namespace shoestring {
namespace runs {
namespace {

using MonitorJson = nlohmann::ordered_json;

constexpr double kGiB = 1024.0 * 1024 * 1024;

template <class Visitor, class Object>
MonitorJson fields_json(const Visitor& visit_fields, const Object& object) {
  MonitorJson json = MonitorJson::object();
  visit_fields([&](const char* name, auto member, Merge) { json[name] = object.*member; });
  return json;
}

const auto kVisitGpu = [](const auto& visit) { visit_gpu_fields(visit); };
const auto kVisitSample = [](const auto& visit) { visit_sample_fields(visit); };

MonitorJson sample_json(const MonitorSample& sample) {
  MonitorJson json = fields_json(kVisitSample, sample);
  json["gpus"] = MonitorJson::array();
  for (const auto& gpu : sample.gpus) json["gpus"].push_back(fields_json(kVisitGpu, gpu));
  return json;
}

template <class Value>
void read(const MonitorJson& json, const char* name, Value& value) {
  if (!json.is_object()) throw std::invalid_argument("expected an object, received " + json.dump());
  if (json.contains(name)) json.at(name).get_to(value);
}

MonitorSample sample_of_json(const MonitorJson& json) {
  MonitorSample sample;
  visit_sample_fields([&](const char* name, auto member, Merge) { read(json, name, sample.*member); });
  for (const auto& each : json.value("gpus", MonitorJson::array())) {
    visit_gpu_fields([&, &gpu = sample.gpus.emplace_back()](const char* name, auto member, Merge) {
      read(each, name, gpu.*member);
    });
  }
  return sample;
}

void line(std::string& text, const std::string& name, const std::string& value) {
  text += name + std::string(name.size() < 16 ? 16 - name.size() : 1, ' ') + value + "\n";
}

}  // namespace

std::string number(double value) {
  const double size = std::fabs(value);
  const int digits = size >= 99.95 || size < 5e-4 ? 0 : size >= 9.995 ? 1 : size >= 0.9995 ? 2 : 3;
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  std::string result = text;
  if (result.find('.') != std::string::npos) {
    result.erase(result.find_last_not_of('0') + 1);
    if (result.back() == '.') result.pop_back();
  }
  return result;
}

std::string percent(double share) { return number(std::round(100 * share)) + " %"; }
std::string gibibytes(double bytes) { return number(bytes / kGiB); }
std::string count(int64_t value, const char* one, const char* several) {
  return std::to_string(value) + " " + (value == 1 ? one : several);
}

MonitorReport report_of_json(const std::string& text) {
  const MonitorJson json = MonitorJson::parse(text);
  MonitorMachine machine;
  const MonitorJson& machine_json = json.at("machine");
  read(machine_json, "cores", machine.cores);
  read(machine_json, "memory", machine.memory);
  read(machine_json, "disk", machine.disk);
  read(machine_json, "workers", machine.workers);
  read(machine_json, "gpu_names", machine.gpu_names);
  read(machine_json, "gpu_memory", machine.gpu_memory);
  std::vector<MonitorSample> samples;
  for (const auto& sample : json.at("samples")) samples.push_back(sample_of_json(sample));
  return monitor_report(std::move(machine), std::move(samples));
}

}  // namespace runs

std::string MonitorReport::json() const {
  using runs::MonitorJson;
  MonitorJson findings_json = MonitorJson::array(), samples_json = MonitorJson::array();
  for (const auto& each : findings) {
    findings_json.push_back({{"resource", each.resource},
                             {"share", each.share},
                             {"evidence", each.evidence},
                             {"cure", each.cure}});
  }
  for (const auto& sample : samples) samples_json.push_back(runs::sample_json(sample));
  const MonitorJson json = {{"findings", findings_json},
                            {"machine",
                             {{"cores", machine.cores},
                              {"memory", machine.memory},
                              {"disk", machine.disk},
                              {"workers", machine.workers},
                              {"gpu_names", machine.gpu_names},
                              {"gpu_memory", machine.gpu_memory}}},
                            {"total", runs::sample_json(total)},
                            {"samples", samples_json}};
  return json.dump(-1, ' ', false, MonitorJson::error_handler_t::replace);
}

std::string MonitorReport::table() const {
  using namespace runs;
  std::string text;
  const double seconds = total.seconds > 0 ? total.seconds : 1;
  line(text, "time", number(total.seconds) + " s");
  if (total.steps > 0) {
    const double loop = std::max(total.wait_seconds + total.step_seconds, 1e-9);
    line(text, "steps",
         number(total.steps) + ", " + number(1e3 * total.step_seconds / total.steps) + " ms each, and " +
             number(1e3 * total.wait_seconds / total.steps) + " ms of waiting for data (" +
             percent(total.wait_seconds / loop) + ")");
  }
  line(text, "cpu",
       number(total.cpu_seconds / seconds) + " of " + number(machine.cores) + " cores; machine " +
           number(total.machine_cpu_seconds / seconds) + "; busiest thread " +
           number(total.thread_seconds / seconds));
  line(text, "memory",
       "peak " + gibibytes(total.memory_peak) + " GiB in " +
           count(std::lround(total.processes), "process", "processes") + "; machine " +
           gibibytes(total.machine_memory_peak) + " of " + gibibytes(machine.memory) + " GiB");
  line(text, "swap",
       number(total.swapped_bytes / 1e6) + " MB; " + number(total.major_faults) + " page faults from disk");
  line(text, "disk",
       "read " + number(total.read_bytes / 1e6) + " MB, written " + number(total.written_bytes / 1e6) +
           " MB" +
           (machine.disk.empty() ? ""
                                 : "; " + machine.disk + " busy " + percent(total.disk_seconds / seconds)));
  if (total.device_memory_peak > 0) {
    line(text, "device memory",
         "peak " + gibibytes(total.device_memory_peak) + " GiB of PyTorch's allocator");
  }
  for (size_t i = 0; i < total.gpus.size(); ++i) {
    const MonitorGpu& gpu = total.gpus[i];
    line(text, "gpu " + std::to_string(i),
         (i < machine.gpu_names.size() ? machine.gpu_names[i] + ": " : "") + "busy " +
             percent(gpu.busy_seconds / seconds) + ", memory peak " + gibibytes(gpu.memory_peak) + " of " +
             gibibytes(i < machine.gpu_memory.size() ? machine.gpu_memory[i] : 0) + " GiB, " +
             number(gpu.energy / seconds) + " W" + (gpu.is_used > 0 ? "" : "; not used by this run"));
  }
  if (findings.empty()) line(text, "bottleneck", "none found: the run is bound by computing, or too short");
  for (const auto& each : findings) {
    line(text, each.resource, each.evidence + ".");
    line(text, "", each.cure);
  }
  return text;
}

}  // namespace shoestring
