#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

#include <ATen/Parallel.h>

/// Runs a task in a forked child process and returns the task's result, or -1 if the child hangs (30 s) or is
/// killed.
template <class Task>
int in_child(Task&& task) {
  const pid_t child = ::fork();
  if (child == 0) {
    int status = 99;
    try {
      at::set_num_threads(1);  // the child has no OpenMP worker threads
      status = task();
    } catch (...) {
    }
    ::_exit(status);
  }
  int status = 0;
  for (int i = 0; i < 6000; ++i) {
    if (::waitpid(child, &status, WNOHANG) == child) return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, &status, 0);
  return -1;
}
