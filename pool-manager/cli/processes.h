#pragma once
// Processes of a pool, identified beyond their pid (pids are reused), and ended within a bound.

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

namespace gpupool::cli {

struct ProcessName {
  pid_t pid = -1;
  unsigned long long startTicks = 0;  // field 22 of /proc/<pid>/stat; with the pid it names one process
  std::string role;                   // "server" ...
};

// Of a living process; startTicks 0 if there is none.
ProcessName nameProcess(pid_t pid, const std::string& role);
bool alive(const ProcessName& process);

// SIGTERM, and after `patience` SIGKILL. Works for any process, ours or not; true if it is gone at the end.
bool endProcess(const ProcessName& process, std::chrono::milliseconds patience);

// Starts words[0] in a session of its own, with /dev/null as input and `log` as output, ending when this
// process does. extra: "NAME=value". Throws std::runtime_error if it cannot be executed.
ProcessName startDaemon(const std::vector<std::string>& words, const std::vector<std::string>& extra,
                        const std::string& log, const std::string& role);

// Our own children by now (with PR_SET_CHILD_SUBREAPER, orphans of our children are ours too).
std::vector<pid_t> children();

void writeProcesses(const std::string& path, const std::vector<ProcessName>& processes);
std::vector<ProcessName> readProcesses(const std::string& path);

// The last lines of a file.
std::string tail(const std::string& path, size_t lines);

}  // namespace gpupool::cli
