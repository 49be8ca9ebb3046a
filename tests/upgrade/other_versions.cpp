// Linked in place of schema::poolProtocol() and oldestPoolProtocol() (see CMakeLists.txt): of a peer of the
// version before, which knew nothing of ranges, or of the one to come.
#include "schema/protocol.h"

extern "C" uint32_t realProtocol() __asm__("__real__ZN7gpupool6schema12poolProtocolEv");
extern "C" uint32_t otherProtocol() __asm__("__wrap__ZN7gpupool6schema12poolProtocolEv");
extern "C" uint32_t otherOldest() __asm__("__wrap__ZN7gpupool6schema18oldestPoolProtocolEv");

#ifdef VERSION_BEFORE
uint32_t otherProtocol() { return realProtocol() - 1; }
uint32_t otherOldest() { return 0; }
#else
uint32_t otherProtocol() { return realProtocol() + 1; }
uint32_t otherOldest() { return realProtocol(); }
#endif
