// Preloaded into a process: writes every path that it opens to the file that GPUPOOL_OPENED_PATHS names, a
// line each, and opens it. "descriptor:": a name in a folder that the process has as a descriptor. Not
// here: what the dynamic linker opens for itself, and O_PATH, which reads nothing (the walls name files so).
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace {

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

int logFile = -1;

// Once, at the start: later a worker may open no such file (server/walls/walls.h).
__attribute__((constructor)) void openLog() {
  if (const char* log = std::getenv("GPUPOOL_OPENED_PATHS"))
    logFile = next<int(const char*, int, ...)>("open")(log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
}

void note(const char* how, int folder, const char* path) {
  if (logFile < 0 || path == nullptr) return;
  char line[4200];
  const bool beside = path[0] != '/' && folder != AT_FDCWD;
  const int size = std::snprintf(line, sizeof line, "%s %s%s\n", how, beside ? "descriptor:" : "", path);
  if (write(logFile, line, static_cast<size_t>(size)) != size) std::abort();
}

bool hasMode(int flags) { return (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE; }

}  // namespace

#define OPEN(NAME)                                                     \
  extern "C" int NAME(const char* path, int flags, ...) {              \
    va_list list;                                                      \
    va_start(list, flags);                                             \
    const int mode = hasMode(flags) ? va_arg(list, int) : 0;           \
    va_end(list);                                                      \
    if ((flags & O_PATH) == 0) note(#NAME, AT_FDCWD, path);            \
    return next<int(const char*, int, ...)>(#NAME)(path, flags, mode); \
  }
#define OPENAT(NAME)                                                                \
  extern "C" int NAME(int folder, const char* path, int flags, ...) {               \
    va_list list;                                                                   \
    va_start(list, flags);                                                          \
    const int mode = hasMode(flags) ? va_arg(list, int) : 0;                        \
    va_end(list);                                                                   \
    if ((flags & O_PATH) == 0) note(#NAME, folder, path);                           \
    return next<int(int, const char*, int, ...)>(#NAME)(folder, path, flags, mode); \
  }
#define FOPEN(NAME)                                                  \
  extern "C" FILE* NAME(const char* path, const char* mode) {        \
    note(#NAME, AT_FDCWD, path);                                     \
    return next<FILE*(const char*, const char*)>(#NAME)(path, mode); \
  }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
FOPEN(fopen)
FOPEN(fopen64)

extern "C" DIR* opendir(const char* path) {
  note("opendir", AT_FDCWD, path);
  return next<DIR*(const char*)>("opendir")(path);
}
extern "C" int shm_open(const char* name, int flags, mode_t mode) {
  note("shm_open", AT_FDCWD, name);
  return next<int(const char*, int, mode_t)>("shm_open")(name, flags, mode);
}
