#include <sys/mman.h>

extern "C" __attribute__((visibility("default"))) void* callMmap(void* hint, size_t bytes, int flags) {
  return mmap(hint, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
}
