#pragma once
// PTX text -> ptx::Module. Throws SyntaxError; never leaves a name unresolved that the text itself must
// define.

#include <string_view>

#include "server/softgpu/ptx/lexer.h"
#include "server/softgpu/ptx/module.h"

namespace gpupool::softgpu::ptx {

Module parse(std::string_view source);

}  // namespace gpupool::softgpu::ptx
