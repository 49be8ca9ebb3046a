// Linked in place of schema::rowsHash() (see CMakeLists.txt): the fingerprint of a version with other call
// rows.
#include "schema/rows.h"

extern "C" uint64_t realRowsHash() __asm__("__real__ZN7gpupool6schema8rowsHashEv");
extern "C" uint64_t otherRowsHash() __asm__("__wrap__ZN7gpupool6schema8rowsHashEv");

uint64_t otherRowsHash() { return realRowsHash() + 1; }
