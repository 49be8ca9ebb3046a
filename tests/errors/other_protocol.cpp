// Linked in place of schema::poolProtocol() (see CMakeLists.txt): the manager of another version.
#include "schema/protocol.h"

extern "C" uint32_t otherPoolProtocol() __asm__("__wrap__ZN7gpupool6schema12poolProtocolEv");

uint32_t otherPoolProtocol() { return 1001; }
