#include "base/log.h"

#include <unistd.h>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace gpupool::log {
namespace {

char processName[32] = "";
int descriptor = STDERR_FILENO;

Level threshold() {
  static const Level level = [] {
    const char* text = std::getenv("GPUPOOL_LOG");
    if (text == nullptr) return Level::warning;
    if (std::strcmp(text, "error") == 0) return Level::error;
    if (std::strcmp(text, "info") == 0) return Level::info;
    if (std::strcmp(text, "debug") == 0) return Level::debug;
    if (*text != '\0' && std::strcmp(text, "warning") != 0) {
      char line[160];
      const int length =
          std::snprintf(line, sizeof line,
                        "gpupool: GPUPOOL_LOG is '%.32s', and not error, warning, info or debug\n", text);
      if (::write(descriptor, line, static_cast<size_t>(length)) < 0) return Level::warning;
    }
    return Level::warning;
  }();
  return level;
}

}  // namespace

void setProcessName(const char* name) { std::snprintf(processName, sizeof processName, "%s", name); }

void setDescriptor(int other) { descriptor = other; }

bool enabled(Level level) { return level <= threshold(); }

void write(Level level, const char* format, ...) {
  if (!enabled(level)) return;
  char line[1024];
  int length = std::snprintf(line, sizeof line, "gpupool%s%s: ", processName[0] ? " " : "", processName);
  va_list arguments;
  va_start(arguments, format);
  int added = std::vsnprintf(line + length, sizeof line - length - 1, format, arguments);
  va_end(arguments);
  length += added < 0 ? 0 : added;
  if (length > static_cast<int>(sizeof line) - 2) length = sizeof line - 2;
  line[length++] = '\n';
  if (::write(descriptor, line, length) < 0) return;  // nobody left to tell
}

}  // namespace gpupool::log
