// PTX text: what load() says of bad modules, linking, memory forms, atomics, control flow, textures.
#include <array>
#include <bit>
#include <cstring>
#include <thread>

#include "server/softgpu/tests/engine_harness.h"

namespace gpupool::softgpu::test {

namespace {
const std::string kHeader = ".version 9.0\n.target sm_90\n.address_size 64\n";
}

TEST_CASE("load() names the line and the instruction it lacks") {
  Loaded unknown(kernelOf("wgmma.fence.sync.aligned;"));
  CHECK_FALSE(unknown.fine());
  CHECK(unknown.error().kind == CompileError::Kind::unsupported);
  CHECK(unknown.error().text == "line 9: wgmma.fence.sync.aligned");

  Loaded syntax(kHeader + ".visible .entry test() {\n add.u32 %r1, ;\n}");
  CHECK(Loaded(kernelOf("add.u32 %r1, %r2;")).error().text == "line 9: add: too few operands");
  CHECK(Loaded(kernelOf("mov.u32 %x1, 5;")).error().kind == CompileError::Kind::syntax);
  CHECK_FALSE(syntax.fine());
  CHECK(syntax.error().kind == CompileError::Kind::syntax);
  CHECK(syntax.error().text.starts_with("line 5: "));

  Loaded unresolved(kernelOf("call missing;", ".extern .func missing;\n"));
  CHECK_FALSE(unresolved.fine());
  CHECK(unresolved.error().kind == CompileError::Kind::unresolved);
  CHECK(unresolved.error().text.find("missing") != std::string::npos);

  Loaded label(kernelOf("bra nowhere;"));
  CHECK_FALSE(label.fine());
  for (const char* broken :
       {"", "{", ".version", ".visible .entry", ".visible .entry test( { }", "\"", ".entry x(){"})
    CHECK_FALSE(Loaded(std::string(broken).empty() ? std::string(1, '?') : std::string(broken)).fine());
}

TEST_CASE("modules are linked by their visible names") {
  Loaded loaded(std::vector<std::string>{
      kHeader + ".extern .func (.param .b32 r) mix(.param .b32 a, .param .b32 b);\n.extern .global .align 4 "
                ".u32 shared_value;\n"
                ".visible .entry test(.param .u64 in, .param .u64 out) { .reg .b32 %r<8>; .reg .b64 %rd<4>;\n"
                "ld.global.u32 %r1, [shared_value]; { .param .b32 a; .param .b32 b; .param .b32 r; "
                "st.param.b32 [a], %r1;"
                "st.param.b32 [b], 5; call.uni (r), mix, (a, b); ld.param.b32 %r2, [r]; }\n"
                "ld.param.u64 %rd1, [out]; st.global.u32 [%rd1], %r2; ret; }",
      kHeader + ".visible .global .align 4 .u32 shared_value = 37;\n"
                ".visible .func (.param .b32 r) mix(.param .b32 a, .param .b32 b) { .reg .b32 %r<4>;\n"
                "ld.param.b32 %r1, [a]; ld.param.b32 %r2, [b]; mad.lo.u32 %r3, %r1, %r2, 1; st.param.b32 "
                "[r], %r3; ret; }"});
  INFO(loaded.error().text);
  REQUIRE(loaded.fine());
  DeviceMemory out(64);
  REQUIRE(loaded.run("test", {1}, {1}, uint64_t{0}, out.address()) == Outcome::ok);
  CHECK(out.as<uint32_t>()[0] == 186);
}

TEST_CASE("initialisers hold addresses, and pieces of them") {
  Loaded loaded(
      kHeader +
      ".global .align 4 .u32 target[4] = {1, 2, 3, 4};\n.global .align 8 .u64 whole = generic(target)+8;\n"
      ".global .align 8 .b8 pieces[8] = {0xFF(target), 0xFF00(target), 0xFF0000(target), 0xFF000000(target),"
      "0xFF00000000(target), 0xFF0000000000(target), 0xFF000000000000(target), 0xFF00000000000000(target)};\n"
      ".global .f64 real = 0d3FF8000000000000;\n.global .align 4 .f32 reals[2] = {0f3F800000, -2.5};\n");
  INFO(loaded.error().text);
  REQUIRE(loaded.fine());
  CHECK(*reinterpret_cast<uint64_t*>(loaded.global("whole")) == loaded.global("target") + 8);
  CHECK(*reinterpret_cast<uint64_t*>(loaded.global("pieces")) == loaded.global("target"));
  CHECK(*reinterpret_cast<double*>(loaded.global("real")) == 1.5);
  CHECK(reinterpret_cast<float*>(loaded.global("reals"))[1] == -2.5f);
}

TEST_CASE("atomics on global, shared and generic addresses") {
  // Every thread of the block: 64 of them.
  struct Case {
    const char* type;
    const char* operation;
    const char* operand;  // of thread %i in %r1, zero-extended in %rd1, as a number in %f1 and %fd1
    uint64_t start;
    uint64_t result;
  };
  const Case cases[] = {
      {"u32", "add", "%r1", 5, 5 + 2016},
      {"u64", "add", "%rd1", ~uint64_t{0}, 2015},
      {"s32", "min", "%r2", 5, static_cast<uint32_t>(-63)},
      {"u32", "max", "%r2", 5, static_cast<uint32_t>(-1)},
      {"s64", "max", "%rd1", static_cast<uint64_t>(-9), 63},
      {"b32", "or", "%r1", 0x100, 0x13F},
      {"b64", "xor", "%rd1", 1, 1},
      {"b32", "and", "%r1", 0xFF, 0},
      {"u32", "inc", "9", 0, 4},
      {"u32", "dec", "9", 0, 6},
      {"f32", "add", "%f1", 0, std::bit_cast<uint32_t>(2016.0f)},
      {"f64", "add", "%fd1", 0, std::bit_cast<uint64_t>(2016.0)},
      {"f16x2", "add.noftz", "0x3C004000", 0, 0x54005800},
      {"bf16x2", "add.noftz", "0x3F804000", 0, 0x42804300},
      {"b32", "exch", "77", 1, 77},
      {"b64", "exch", "77", 1, 77},
  };
  const std::string prepare =
      "mov.u32 %r1, %i; neg.s32 %r2, %i; cvt.u64.u32 %rd1, %i; cvt.rn.f32.u32 %f1, %i;"
      "cvt.rn.f64.u32 %fd1, %i; mov.u32 %r9, 0; mov.u64 %rd9, 0;";
  for (const Case& one : cases) {
    bool wide = std::string(one.type).ends_with("64");
    bool packed = std::string(one.type).ends_with("x2");
    std::string operand = one.operand;
    std::string setUp = packed ? "mov.b32 %r3, " + operand + ";" : "";
    if (packed) operand = "%r3";
    std::string old = one.type == std::string("f32")   ? "%f9"
                      : one.type == std::string("f64") ? "%fd9"
                      : wide                           ? "%rd9"
                                                       : "%r9";
    for (const char* space : {".global", ".shared", ""}) {
      std::string name = std::string("atom") + space + "." + one.operation + "." + one.type;
      std::string body = prepare + setUp;
      if (std::string(space) == ".shared") {
        body += "ld.global.u64 %rd20, [%in]; @%p0 bra W; st.shared.u64 [cell], %rd20; W: bar.sync 0;" + name +
                " " + old + ", [cell], " + operand +
                "; bar.sync 0; ld.shared.u64 %rd20, [cell]; st.global.u64 [%in], %rd20;";
      } else {
        body += name + " " + old + ", [%in], " + operand + ";";
      }
      Loaded loaded(kernelOf("setp.ne.u32 %p0, %i, 0;" + body, ".shared .align 8 .b8 cell[8];\n"));
      INFO(name << " " << loaded.error().text);
      REQUIRE(loaded.fine());
      DeviceMemory cell(64);
      cell.as<uint64_t>()[0] = one.start;
      REQUIRE(loaded.run("test", {1}, {64}, cell.address(), cell.address()) == Outcome::ok);
      CHECK(cell.as<uint64_t>()[0] == one.result);
    }
  }
}

TEST_CASE("atomic additions of many blocks lose nothing") {
  Loaded loaded(kernelOf(
      "mov.f32 %f1, 0f3F800000; atom.global.add.f32 %f2, [%in], %f1; red.global.add.u64 [%in+8], 3;\n"
      "L: ld.relaxed.gpu.global.u32 %r1, [%in+16]; add.u32 %r2, %r1, 2; atom.global.cas.b32 %r3, [%in+16], "
      "%r1, %r2;"
      "setp.ne.u32 %p1, %r1, %r3; @%p1 bra L;"));
  REQUIRE(loaded.fine());
  DeviceMemory cell(64);
  REQUIRE(loaded.run("test", {300}, {128}, cell.address(), cell.address()) == Outcome::ok);
  CHECK(cell.as<float>()[0] == 38400.0f);
  CHECK(cell.as<uint64_t>()[1] == 115200);
  CHECK(cell.as<uint32_t>()[4] == 76800);
}

TEST_CASE("vector loads and stores, extension, 128 bits") {
  std::vector<std::array<uint32_t, 4>> in{{0x80, 0xFFFF8000, 3, 4}, {0x7F, 6, 7, 8}};
  auto out = mapKernel<std::array<uint32_t, 4>, std::array<uint32_t, 4>>(
      "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%src]; ld.global.s8 %r5, [%src]; ld.global.u16 %r6, [%src+4];"
      "ld.global.v2.u64 {%rd1, %rd2}, [%src]; cvt.u32.u64 %r7, %rd2; add.u32 %r7, %r7, %r4;"
      "st.global.v4.b32 [%dst], {%r5, %r6, %r7, %r2};",
      in);
  CHECK(out[0] == std::array<uint32_t, 4>{0xFFFFFF80, 0x8000, 7, 0xFFFF8000});
  CHECK(out[1] == std::array<uint32_t, 4>{0x7F, 6, 15, 6});
  auto copied = mapKernel<std::array<uint32_t, 4>, std::array<uint32_t, 4>>(
      ".reg .b128 %q; ld.global.b128 %q, [%src]; st.global.b128 [%dst], %q;", in);
  CHECK(copied == in);
}

TEST_CASE("a register in braces is the register") {
  const std::vector<uint32_t> in{1, 2, 3};
  const auto out = mapKernel<uint32_t, uint32_t>(
      "ld.global.u32 {%r1}, [%src]; add.u32 %r1, %r1, 1; st.global.u32 [%dst], {%r1};", in);
  CHECK(out == std::vector<uint32_t>{2, 3, 4});
}

TEST_CASE("multimem faults where it is run: there are no multicast objects") {
  Loaded loaded(
      kernelOf("setp.eq.u64 %p1, %in, 0; @%p1 multimem.red.relaxed.sys.global.add.u32 [%out], 1;"
               "@%p1 multimem.ld_reduce.relaxed.sys.global.add.u32 %r1, [%out]; st.global.u32 [%out], 7;"));
  INFO(loaded.error().text);
  REQUIRE(loaded.fine());
  DeviceMemory out(64);
  CHECK(loaded.run("test", {1}, {1}, uint64_t{1}, out.address()) == Outcome::ok);
  CHECK(out.as<uint32_t>()[0] == 7);
  CHECK(loaded.run("test", {1}, {1}, uint64_t{0}, out.address()) == Outcome::illegalInstruction);
}

TEST_CASE("a volatile vector is written and read at once") {
  Loaded loaded(
      kernelOf("mov.u32 %r2, 0; mov.u32 %r7, 0; setp.ne.u64 %p1, %out, 0; @%p1 bra Read;\n"
               "Write: add.u32 %r2, %r2, 1; st.volatile.global.v4.u32 [%in], {%r2, %r2, %r2, %r2};"
               "setp.lt.u32 %p2, %r2, 50000000; @%p2 bra Write; exit;\n"
               "Read: ld.volatile.global.v4.u32 {%r3, %r4, %r5, %r6}, [%in]; setp.ne.u32 %p3, %r3, %r4;"
               "@%p3 add.u32 %r7, %r7, 1; setp.ne.u32 %p3, %r3, %r6; @%p3 add.u32 %r7, %r7, 1;"
               "setp.lt.u32 %p2, %r6, 50000000; @%p2 bra Read; st.global.u32 [%out], %r7;"));
  INFO(loaded.error().text);
  REQUIRE(loaded.fine());
  DeviceMemory flags(64), out(64);
  out.as<uint32_t>()[0] = 1;
  std::thread writer([&] { loaded.run("test", {1}, {1}, flags.address(), uint64_t{0}); });
  const Outcome read = loaded.run("test", {1}, {1}, flags.address(), out.address());
  writer.join();
  REQUIRE(read == Outcome::ok);
  CHECK(out.as<uint32_t>()[0] == 0);
}

TEST_CASE("branches, tables, exits and alloca") {
  std::vector<uint32_t> in{0, 1, 2, 3, 4, 5};
  auto out = mapKernel<uint32_t, uint32_t>(
      "ld.global.u32 %r1, [%src]; setp.gt.u32 %p1, %r1, 3; @%p1 bra Other;\nTargets: .branchtargets A, B, C, "
      "D;\n"
      "brx.idx %r1, Targets;\nA: mov.u32 %r2, 10; bra Done;\nB: mov.u32 %r2, 11; bra Done;\nC: mov.u32 %r2, "
      "12; bra Done;\n"
      "D: mov.u32 %r2, 13; bra Done;\nOther: setp.eq.u32 %p2, %r1, 5; @%p2 exit; alloca.u64 %rd1, 16, 8; "
      "st.local.u32 [%rd1+8], %r1;"
      "ld.local.u32 %r2, [%rd1+8]; isspacep.local %p3, %rd1; @%p3 add.u32 %r2, %r2, 100;\n"
      "Done: st.global.u32 [%dst], %r2;",
      in);
  CHECK(out == std::vector<uint32_t>{10, 11, 12, 13, 104, 0});
}

TEST_CASE("a thread that exits inside a function") {
  Loaded loaded(kernelOf(
      "{ .param .b32 a; st.param.b32 [a], %i; call leave, (a); }"
      "bar.sync 0; mul.wide.u32 %rd1, %i, 4; add.u64 %rd1, %rd1, %out; st.global.u32 [%rd1], 1;",
      ".func leave(.param .b32 a) { .reg .b32 %r; .reg .pred %p; ld.param.b32 %r, [a]; and.b32 %r, %r, 1;"
      "setp.eq.u32 %p, %r, 1; @%p exit; ret; }\n"));
  INFO(loaded.error().text);
  REQUIRE(loaded.fine());
  DeviceMemory out(4096);
  REQUIRE(loaded.run("test", {1}, {100}, out.address(), out.address()) == Outcome::ok);
  int sum = 0;
  for (int i = 0; i < 100; ++i) sum += out.as<int>()[i] * (i % 2 == 0 ? 1 : 1000);
  CHECK(sum == 50);
}

TEST_CASE("special registers") {
  Loaded loaded(kernelOf(
      "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mad.lo.u32 %r1, %r1, %r2, %i; mul.wide.u32 %rd1, %r1, 32;"
      "add.u64 %rd1, %rd1, %out; mov.u32 %r3, %laneid; mov.u32 %r4, %warpid; mov.u32 %r5, %lanemask_lt;"
      "mov.u32 %r6, %nctaid.x; mov.u32 %r7, %tid.y; mov.u32 %r8, %lanemask_ge; mov.u32 %r9, "
      "%dynamic_smem_size;"
      "mov.u32 %r10, %nwarpid; st.global.v4.u32 [%rd1], {%r3, %r4, %r5, %r6}; st.global.v4.u32 [%rd1+16], "
      "{%r7, %r8, %r9, %r10};"));
  REQUIRE(loaded.fine());
  loaded.dynamicShared = 48;
  DeviceMemory out(size_t{3} * 64 * 32);
  REQUIRE(loaded.run("test", {3}, {64}, out.address(), out.address()) == Outcome::ok);
  const auto* row = out.as<uint32_t>() + size_t{64 + 37} * 8;
  CHECK(std::vector<uint32_t>(row, row + 8) == std::vector<uint32_t>{5, 1, 31, 3, 0, 0xFFFFFFE0, 48, 2});
}

TEST_CASE("textures and surfaces go through the seam") {
  Loaded loaded(
      kernelOf("mov.f32 %f1, 0f40E00000; mov.u32 %r20, 3; tex.a2d.v4.u32.f32 {%r1, %r2, %r3, %r4}, [%in, "
               "{%r20, %f1, %f1, %f1}];"
               "st.global.v4.u32 [%out], {%r1, %r2, %r3, %r4}; mov.u32 %r21, 8; mov.u32 %r22, 1;"
               "sust.b.2d.v2.b32.trap [%out, {%r21, %r22}], {%r2, %r3}; suld.b.2d.b32.clamp {%r5}, [%out, "
               "{%r21, %r22}];"
               "st.global.u32 [%out+16], %r5;"));
  INFO(loaded.error().text);
  REQUIRE(loaded.fine());
  DeviceMemory out(4096);
  REQUIRE(loaded.run("test", {1}, {1}, out.address(), out.address()) == Outcome::ok);
  auto layered = static_cast<uint32_t>(TextureFetch::Geometry::a2);
  CHECK(out.as<uint32_t>()[1] == layered);
  CHECK(out.as<uint32_t>()[2] == 7);
  CHECK(out.as<uint32_t>()[3] == 3);
  CHECK(out.as<uint32_t>()[16 + 3] == 7);
  CHECK(out.as<uint32_t>()[4] == layered);
  CHECK(loaded.run("test", {1}, {1}, uint64_t{0}, out.address()) == Outcome::illegalAddress);
}

}  // namespace gpupool::softgpu::test
