// Registers the monitor that Python's Monitor drives.

#include <shoestring/runs/monitor.h>
#include <torch/custom_class.h>
#include <torch/library.h>

namespace shoestring::runs {
namespace {

struct MonitorClass : torch::CustomClassHolder {
  MonitorClass(double interval, std::optional<c10::Device> device)
      : monitor(MonitorOptions(interval).device(device)) {}

  Monitor monitor;
};

using MonitorSelf = c10::intrusive_ptr<MonitorClass>;

// A report is its JSON in one line, and its table.
std::string report_text(const MonitorReport& report) { return report.json() + "\n" + report.table(); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  m.class_<MonitorClass>("Monitor")
      .def(torch::init<double, std::optional<c10::Device>>())
      .def("set_workers",
           [](const MonitorSelf& self, int64_t workers) { self->monitor.set_workers(workers); })
      .def("begin_wait", [](const MonitorSelf& self) { self->monitor.begin_wait(); })
      .def("end_wait", [](const MonitorSelf& self) { self->monitor.end_wait(); })
      .def("begin_step", [](const MonitorSelf& self) { self->monitor.begin_step(); })
      .def("end_step", [](const MonitorSelf& self) { self->monitor.end_step(); })
      .def("end_loop", [](const MonitorSelf& self) { self->monitor.end_loop(); })
      .def("report", [](const MonitorSelf& self) { return report_text(self->monitor.report()); })
      .def("stop", [](const MonitorSelf& self) { return report_text(self->monitor.stop()); });
}

}  // namespace shoestring::runs
