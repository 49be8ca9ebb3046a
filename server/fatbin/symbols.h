#pragma once
// The variables of a code image. The driver gives the address of a variable whose name is known, but lists
// none; so the image is read. As observed of nvcc 13.0. The bytes come from outside: every length is checked
// against its container, and what is unpacked is bounded. Pure functions, any thread.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace gpupool::fatbin {

// A __device__, __constant__ or __managed__ variable, under the name that cuModuleGetGlobal takes. `bytes`
// is what the image says; the driver has the last word.
struct Symbol {
  std::string name;
  uint64_t bytes = 0;
  bool constant = false;
  bool managed = false;
};

// The variables of the code that the driver would choose of this image on a device of `architecture` (the
// same choice as mayPrint), added to `symbols`. The image: a fatbin, machine code or PTX. False: what is
// there cannot be read; `symbols` is as it was. True without variables: there is no code for that device.
//
// Local variables are among them, and what compilers made (strings of printf, tables of libdevice): the
// driver does not find each of them. Textures and surfaces are not. A name occurs more than once only if
// linked machine code has several local variables of that name: the driver finds one of them.
bool readSymbols(std::span<const std::byte> image, unsigned architecture, std::vector<Symbol>& symbols);

// May kernels of this image use the device's heap (malloc, free, new and delete in kernels)? What cannot be
// read may.
bool mayAllocate(std::span<const std::byte> image, unsigned architecture);

// The same of a program that nvcc linked: `parts` are the fatbin of the linked code, then those that it was
// linked from. If the first has no code for the device, the driver links the others.
using Parts = std::span<const std::span<const std::byte>>;
bool readLinkedSymbols(Parts parts, unsigned architecture, std::vector<Symbol>& symbols);
bool linkedMayAllocate(Parts parts, unsigned architecture);

}  // namespace gpupool::fatbin
