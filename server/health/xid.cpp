#include "server/health/xid.h"

namespace gpupool::health {

const char* fatalXid(uint64_t xid) {
  switch (xid) {
    case 46:
      return "the GPU stopped processing";
    case 48:
      return "an uncorrectable ECC error";
    case 62:
      return "its internal microcontroller halted";
    case 64:
      return "a memory row could not be remapped";
    case 79:
      return "the GPU has fallen off the bus";
    case 95:
      return "an uncontained memory error";
    case 110:
      return "a security fault";
    case 119:
      return "its GSP does not answer";
    case 120:
      return "an error of its GSP";
    case 140:
      return "an unrecovered ECC error";
    default:
      return nullptr;
  }
}

}  // namespace gpupool::health
