#pragma once
// One line per event on stderr: "gpupool <who>: <text>". GPUPOOL_LOG = error | warning (default) | info |
// debug. Any thread; each line is one write(2). Never allocates after the first call.

namespace gpupool::log {

enum class Level { error, warning, info, debug };

// Names the process in every line ("client", "worker 3"); copied, at most 31 characters are kept.
void setProcessName(const char* name);
// Lines go there instead of descriptor 2.
void setDescriptor(int descriptor);
bool enabled(Level level);
void write(Level level, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace gpupool::log

#define GPUPOOL_ERROR(...) ::gpupool::log::write(::gpupool::log::Level::error, __VA_ARGS__)
#define GPUPOOL_WARNING(...) ::gpupool::log::write(::gpupool::log::Level::warning, __VA_ARGS__)
#define GPUPOOL_INFO(...)                                              \
  do {                                                                 \
    if (::gpupool::log::enabled(::gpupool::log::Level::info))          \
      ::gpupool::log::write(::gpupool::log::Level::info, __VA_ARGS__); \
  } while (0)
#define GPUPOOL_DEBUG(...)                                              \
  do {                                                                  \
    if (::gpupool::log::enabled(::gpupool::log::Level::debug))          \
      ::gpupool::log::write(::gpupool::log::Level::debug, __VA_ARGS__); \
  } while (0)
