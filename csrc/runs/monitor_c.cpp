// The functions that Python's command `shoestring monitor` calls through ctypes, without PyTorch. Texts that
// they return are freed by shoestring_monitor_free.

#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>

#include <shoestring/core/export.h>

#include "runs/monitor_fields.h"
#include "runs/monitor_sampler.h"

using shoestring::MonitorReport;
using shoestring::runs::MonitorSampler;

namespace shoestring::runs {
namespace {

char* c_text(const std::string& text) { return ::strdup(text.c_str()); }

// Returns a report as text: its JSON in one line, then its table.
char* c_report(const MonitorReport& report) { return c_text(report.json() + "\n" + report.table()); }

}  // namespace
}  // namespace shoestring::runs

extern "C" {

SHOESTRING_API void shoestring_monitor_free(char* text) { std::free(text); }

// Returns the error of an interval, or "".
SHOESTRING_API char* shoestring_monitor_check(double interval) {
  return shoestring::runs::c_text(shoestring::runs::interval_error(interval));
}

// Starts measuring a process and its descendants.
SHOESTRING_API void* shoestring_monitor_start(int pid, double interval) {
  return new MonitorSampler(pid, interval);
}

SHOESTRING_API char* shoestring_monitor_report(void* sampler) {
  return shoestring::runs::c_report(static_cast<MonitorSampler*>(sampler)->report());
}

// Returns the report of the last `seconds`, with one sample.
SHOESTRING_API char* shoestring_monitor_recent(void* sampler, double seconds) {
  auto& of = *static_cast<MonitorSampler*>(sampler);
  return shoestring::runs::c_report(shoestring::monitor_report(of.machine(), {of.recent(seconds)}));
}

SHOESTRING_API void shoestring_monitor_delete(void* sampler) { delete static_cast<MonitorSampler*>(sampler); }

// Returns the report of a machine and of samples, given as the JSON of a report; or "", a line break and an
// error.
SHOESTRING_API char* shoestring_monitor_judge(const char* json) {
  try {
    return shoestring::runs::c_report(shoestring::runs::report_of_json(json));
  } catch (const std::exception& error) {
    return shoestring::runs::c_text(std::string("\n") + error.what());
  }
}
}
