// PTX text of the software GPU: any text is parsed, or refused with a SyntaxError.
//
// Input: the text.
#include "server/softgpu/ptx/parser.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace gpupool::softgpu;
  try {
    ptx::parse({reinterpret_cast<const char*>(data), size});
  } catch (const ptx::SyntaxError&) {
  }
  return 0;
}
