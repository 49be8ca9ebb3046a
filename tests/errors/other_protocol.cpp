// Linked in place of schema::poolProtocol() and oldestPoolProtocol() (see CMakeLists.txt): the manager of
// another version.
#include "schema/protocol.h"

extern "C" uint32_t otherPoolProtocol() __asm__("__wrap__ZN7gpupool6schema12poolProtocolEv");

extern "C" uint32_t otherOldestProtocol() __asm__("__wrap__ZN7gpupool6schema18oldestPoolProtocolEv");

uint32_t otherPoolProtocol() { return 1001; }
uint32_t otherOldestProtocol() { return 1000; }
