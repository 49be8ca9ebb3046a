#include "server/softgpu/tests/engine_cases.h"

#include <bit>
#include <random>

namespace gpupool::softgpu::test {
namespace {

// Classes of operands: r 32-bit, R 64-bit, s 16-bit, b 8-bit integers; f and F floats; h half, H half pair, g
// bfloat, G bfloat pair; n small numbers (shifts, counts); S selectors. A form is "classes > result:
// instruction" with operands %x0 for the result, %x1.. for the inputs.
const char* const kForms[] = {
    "rr>r: add.s32",
    "rr>r: sub.s32",
    "rr>r: add.sat.s32",
    "rr>r: sub.sat.s32",
    "RR>R: add.s64",
    "RR>R: sub.u64",
    "ss>s: add.s16",
    "ss>s: sub.u16",
    "rr>r: mul.lo.s32",
    "rr>r: mul.hi.s32",
    "rr>r: mul.hi.u32",
    "rr>R: mul.wide.s32",
    "rr>R: mul.wide.u32",
    "ss>r: mul.wide.s16",
    "ss>r: mul.wide.u16",
    "ss>s: mul.hi.s16",
    "ss>s: mul.lo.u16",
    "RR>R: mul.lo.s64",
    "RR>R: mul.hi.s64",
    "RR>R: mul.hi.u64",
    "rrr>r: mad.lo.s32",
    "rrr>r: mad.hi.s32",
    "rrr>r: mad.hi.u32",
    "rrr>r: mad.hi.sat.s32",
    "rrR>R: mad.wide.s32",
    "rrR>R: mad.wide.u32",
    "ssr>r: mad.wide.s16",
    "sss>s: mad.lo.s16",
    "RRR>R: mad.lo.u64",
    "RRR>R: mad.hi.s64",
    "rr>r: mul24.lo.s32",
    "rr>r: mul24.lo.u32",
    "rr>r: mul24.hi.s32",
    "rrr>r: mad24.lo.u32",
    "rrr>r: mad24.hi.s32",
    "rrr>r: sad.s32",
    "rrr>r: sad.u32",
    "RRR>R: sad.s64",
    "sss>s: sad.u16",
    "rr>r: div.s32",
    "rr>r: div.u32",
    "rr>r: rem.s32",
    "rr>r: rem.u32",
    "ss>s: div.s16",
    "ss>s: rem.u16",
    "RR>R: div.s64",
    "RR>R: div.u64",
    "RR>R: rem.s64",
    "RR>R: rem.u64",
    "r>r: abs.s32",
    "R>R: abs.s64",
    "s>s: abs.s16",
    "r>r: neg.s32",
    "R>R: neg.s64",
    "rr>r: min.s32",
    "rr>r: max.u32",
    "RR>R: min.u64",
    "RR>R: max.s64",
    "ss>s: min.s16",
    "ss>s: max.u16",
    "rr>r: min.s16x2",
    "rr>r: max.u16x2",
    "rr>r: add.u16x2",
    "rr>r: min.relu.s32",
    "rr>r: max.relu.s16x2",
    "r>r: popc.b32",
    "R>r: popc.b64",
    "r>r: clz.b32",
    "R>r: clz.b64",
    "r>r: brev.b32",
    "R>R: brev.b64",
    "r>r: bfind.u32",
    "r>r: bfind.s32",
    "R>r: bfind.u64",
    "R>r: bfind.s64",
    "r>r: bfind.shiftamt.u32",
    "r>r: bfind.shiftamt.s32",
    "R>r: bfind.shiftamt.s64",
    "rnn>r: bfe.u32",
    "rnn>r: bfe.s32",
    "Rnn>R: bfe.u64",
    "Rnn>R: bfe.s64",
    "rrnn>r: bfi.b32",
    "RRnn>R: bfi.b64",
    "nn>r: bmsk.clamp.b32",
    "nn>r: bmsk.wrap.b32",
    "rn>r: szext.clamp.s32",
    "rn>r: szext.wrap.s32",
    "rn>r: szext.clamp.u32",
    "rn>r: szext.wrap.u32",
    "rrr>r: dp4a.s32.s32",
    "rrr>r: dp4a.u32.u32",
    "rrr>r: dp4a.s32.u32",
    "rrr>r: dp4a.u32.s32",
    "rrr>r: dp2a.lo.s32.s32",
    "rrr>r: dp2a.hi.u32.u32",
    "rrr>r: dp2a.lo.u32.s32",
    "rrr>r: dp2a.hi.s32.u32",
    "rr>r: and.b32",
    "RR>R: or.b64",
    "ss>s: xor.b16",
    "r>r: not.b32",
    "r>r: cnot.b32",
    "R>R: cnot.b64",
    "rn>r: shl.b32",
    "rn>r: shr.u32",
    "rn>r: shr.s32",
    "Rn>R: shl.b64",
    "Rn>R: shr.u64",
    "Rn>R: shr.s64",
    "sn>s: shl.b16",
    "sn>s: shr.u16",
    "sn>s: shr.s16",
    "rrn>r: shf.l.wrap.b32",
    "rrn>r: shf.l.clamp.b32",
    "rrn>r: shf.r.wrap.b32",
    "rrn>r: shf.r.clamp.b32",
    "rrS>r: prmt.b32",
    "rrn>r: prmt.b32.f4e",
    "rrn>r: prmt.b32.b4e",
    "rrn>r: prmt.b32.rc8",
    "rrn>r: prmt.b32.ecl",
    "rrn>r: prmt.b32.ecr",
    "rrn>r: prmt.b32.rc16",
    "rrr>r: vabsdiff4.u32.u32.u32.add",
    "rrr>r: vabsdiff4.u32.u32.u32",
    "rrr>r: vadd4.s32.s32.s32.sat",
    "rrr>r: vsub4.u32.u32.u32.sat",
    "rrr>r: vmin4.s32.s32.s32",
    "rrr>r: vmax2.u32.u32.u32",
    "rrr>r: vavrg4.u32.u32.u32",
    "rrr>r: vavrg4.s32.s32.s32",
    "rrr>r: vadd2.u32.u32.u32",
    "rrr>r: vsub2.s32.s32.s32.sat",
    // floats
    "ff>f: add.f32",
    "ff>f: add.rz.f32",
    "ff>f: add.rm.f32",
    "ff>f: add.rp.f32",
    "ff>f: add.ftz.f32",
    "ff>f: add.sat.f32",
    "ff>f: sub.f32",
    "ff>f: sub.rz.ftz.f32",
    "ff>f: sub.rm.f32",
    "ff>f: mul.f32",
    "ff>f: mul.rz.f32",
    "ff>f: mul.rm.f32",
    "ff>f: mul.rp.f32",
    "ff>f: mul.ftz.f32",
    "ff>f: mul.sat.f32",
    "fff>f: fma.rn.f32",
    "fff>f: fma.rz.f32",
    "fff>f: fma.rm.f32",
    "fff>f: fma.rp.f32",
    "fff>f: fma.rn.ftz.f32",
    "fff>f: fma.rn.sat.f32",
    "ff>f: div.rn.f32",
    "ff>f: div.rz.f32",
    "ff>f: div.rm.f32",
    "ff>f: div.rp.f32",
    "ff>f: div.rn.ftz.f32",
    "f>f: rcp.rn.f32",
    "f>f: rcp.rz.f32",
    "f>f: rcp.rm.f32",
    "f>f: rcp.rp.f32",
    "f>f: rcp.rn.ftz.f32",
    "f>f: sqrt.rn.f32",
    "f>f: sqrt.rz.f32",
    "f>f: sqrt.rm.f32",
    "f>f: sqrt.rp.f32",
    "f>f: sqrt.rn.ftz.f32",
    "FF>F: add.f64",
    "FF>F: add.rz.f64",
    "FF>F: add.rm.f64",
    "FF>F: add.rp.f64",
    "FF>F: sub.f64",
    "FF>F: mul.f64",
    "FF>F: mul.rz.f64",
    "FF>F: mul.rm.f64",
    "FF>F: mul.rp.f64",
    "FFF>F: fma.rn.f64",
    "FFF>F: fma.rz.f64",
    "FFF>F: fma.rm.f64",
    "FFF>F: fma.rp.f64",
    "FF>F: div.rn.f64",
    "FF>F: div.rz.f64",
    "FF>F: div.rm.f64",
    "FF>F: div.rp.f64",
    "F>F: rcp.rn.f64",
    "F>F: rcp.rp.f64",
    "F>F: sqrt.rn.f64",
    "F>F: sqrt.rz.f64",
    "F>F: sqrt.rm.f64",
    "F>F: sqrt.rp.f64",
    "f>f: abs.f32",
    "f>f: abs.ftz.f32",
    "f>f: neg.f32",
    "F>F: abs.f64",
    "F>F: neg.f64",
    "ff>f: min.f32",
    "ff>f: max.f32",
    "ff>f: min.ftz.f32",
    "ff>f: max.NaN.f32",
    "ff>f: min.NaN.f32",
    "ff>f: min.xorsign.abs.f32",
    "ff>f: max.NaN.xorsign.abs.f32",
    "FF>F: min.f64",
    "FF>F: max.f64",
    "ff>f: copysign.f32",
    "FF>F: copysign.f64",
    // halves
    "hh>h: add.f16",
    "hh>h: sub.f16",
    "hh>h: mul.f16",
    "hh>h: add.sat.f16",
    "hh>h: add.ftz.f16",
    "hh>h: mul.ftz.f16",
    "hhh>h: fma.rn.f16",
    "hhh>h: fma.rn.sat.f16",
    "hhh>h: fma.rn.relu.f16",
    "hhh>h: fma.rn.ftz.f16",
    "h>h: neg.f16",
    "h>h: abs.f16",
    "hh>h: min.f16",
    "hh>h: max.NaN.f16",
    "HH>H: add.f16x2",
    "HH>H: sub.f16x2",
    "HH>H: mul.f16x2",
    "HHH>H: fma.rn.f16x2",
    "HH>H: max.f16x2",
    "H>H: neg.f16x2",
    "H>H: abs.f16x2",
    "gg>g: add.rn.bf16",
    "gg>g: sub.rn.bf16",
    "gg>g: mul.rn.bf16",
    "ggg>g: fma.rn.bf16",
    "ggg>g: fma.rn.relu.bf16",
    "g>g: neg.bf16",
    "g>g: abs.bf16",
    "gg>g: min.bf16",
    "gg>g: max.NaN.bf16",
    "GG>G: add.rn.bf16x2",
    "GG>G: mul.rn.bf16x2",
    "GGG>G: fma.rn.bf16x2",
    "GG>G: min.NaN.bf16x2",
    // conversions
    "f>r: cvt.rni.s32.f32",
    "f>r: cvt.rzi.s32.f32",
    "f>r: cvt.rmi.s32.f32",
    "f>r: cvt.rpi.s32.f32",
    "f>r: cvt.rni.u32.f32",
    "f>r: cvt.rzi.u32.f32",
    "f>r: cvt.rzi.ftz.u32.f32",
    "f>r: cvt.rpi.ftz.s32.f32",
    "f>R: cvt.rni.s64.f32",
    "f>R: cvt.rzi.u64.f32",
    "f>s: cvt.rzi.s16.f32",
    "f>s: cvt.rzi.u16.f32",
    "F>r: cvt.rni.s32.f64",
    "F>r: cvt.rzi.u32.f64",
    "F>R: cvt.rzi.s64.f64",
    "F>R: cvt.rmi.s64.f64",
    "F>R: cvt.rpi.u64.f64",
    "F>s: cvt.rzi.s16.f64",
    "r>f: cvt.rn.f32.s32",
    "r>f: cvt.rz.f32.s32",
    "r>f: cvt.rm.f32.s32",
    "r>f: cvt.rp.f32.u32",
    "R>f: cvt.rn.f32.s64",
    "R>f: cvt.rz.f32.u64",
    "R>f: cvt.rp.f32.s64",
    "R>F: cvt.rn.f64.s64",
    "R>F: cvt.rn.f64.u64",
    "R>F: cvt.rz.f64.u64",
    "R>F: cvt.rm.f64.s64",
    "R>F: cvt.rp.f64.u64",
    "r>F: cvt.rn.f64.s32",
    "s>f: cvt.rn.f32.u16",
    "F>f: cvt.rn.f32.f64",
    "F>f: cvt.rz.f32.f64",
    "F>f: cvt.rm.f32.f64",
    "F>f: cvt.rp.f32.f64",
    "F>f: cvt.rn.ftz.f32.f64",
    "F>f: cvt.rn.sat.f32.f64",
    "f>F: cvt.f64.f32",
    "f>F: cvt.ftz.f64.f32",
    "f>f: cvt.rni.f32.f32",
    "f>f: cvt.rzi.f32.f32",
    "f>f: cvt.rmi.f32.f32",
    "f>f: cvt.rpi.f32.f32",
    "f>f: cvt.sat.f32.f32",
    "f>f: cvt.rni.ftz.f32.f32",
    "F>F: cvt.rni.f64.f64",
    "F>F: cvt.rpi.f64.f64",
    "f>h: cvt.rn.f16.f32",
    "f>h: cvt.rz.f16.f32",
    "f>h: cvt.rn.relu.f16.f32",
    "F>h: cvt.rn.f16.f64",
    "h>f: cvt.f32.f16",
    "h>F: cvt.f64.f16",
    "f>g: cvt.rn.bf16.f32",
    "f>g: cvt.rz.bf16.f32",
    "f>g: cvt.rn.relu.bf16.f32",
    "g>f: cvt.f32.bf16",
    "ff>H: cvt.rn.f16x2.f32",
    "ff>H: cvt.rz.f16x2.f32",
    "ff>G: cvt.rn.bf16x2.f32",
    "ff>G: cvt.rn.relu.bf16x2.f32",
    "r>h: cvt.rn.f16.s32",
    "r>h: cvt.rz.f16.u32",
    "R>h: cvt.rn.f16.s64",
    "s>h: cvt.rp.f16.u16",
    "h>r: cvt.rni.s32.f16",
    "h>r: cvt.rzi.u32.f16",
    "h>R: cvt.rzi.s64.f16",
    "h>s: cvt.rzi.s16.f16",
    "h>h: cvt.rni.f16.f16",
    "h>h: cvt.rmi.f16.f16",
    "r>g: cvt.rn.bf16.s32",
    "R>g: cvt.rn.bf16.u64",
    "g>r: cvt.rzi.s32.bf16",
    "f>r: cvt.rna.tf32.f32",
    "f>r: cvt.rn.tf32.f32",
    "f>r: cvt.rz.tf32.f32",
    "ff>s: cvt.rn.satfinite.e4m3x2.f32",
    "ff>s: cvt.rn.satfinite.e5m2x2.f32",
    "ff>s: cvt.rn.satfinite.relu.e4m3x2.f32",
    "H>s: cvt.rn.satfinite.e4m3x2.f16x2",
    "s>H: cvt.rn.f16x2.e4m3x2",
    "s>H: cvt.rn.f16x2.e5m2x2",
    "r>s: cvt.sat.s16.s32",
    "r>s: cvt.sat.u16.s32",
    "r>s: cvt.sat.u16.u32",
    "R>r: cvt.sat.s32.s64",
    "R>r: cvt.sat.u32.s64",
    "R>r: cvt.sat.s32.u64",
    "r>r: cvt.sat.u32.s32",
    "r>R: cvt.s64.s32",
    "r>R: cvt.u64.u32",
    "R>r: cvt.u32.u64",
    "r>r: cvt.s32.s8",
    "r>r: cvt.u32.u8",
    "r>r: cvt.sat.s8.s32",
    "r>r: cvt.sat.u8.s32",
    "rr>r: cvt.pack.sat.s16.s32",
    "rr>r: cvt.pack.sat.u16.s32",
    "rrr>r: cvt.pack.sat.u8.s32.b32",
    "rrr>r: cvt.pack.sat.s8.s32.b32",
    // selection and comparison
    "ff>r: set.lt.u32.f32",
    "ff>r: set.geu.u32.f32",
    "ff>r: set.num.s32.f32",
    "ff>f: set.ne.f32.f32",
    "rr>r: set.hi.u32.u32",
    "rr>f: set.le.f32.s32",
    "FF>r: set.nan.u32.f64",
    "HH>H: set.lt.f16x2.f16x2",
    "rrr>r: slct.s32.s32",
    "rrf>r: slct.b32.f32",
    "ffr>f: slct.f32.s32",
    "f>f: ex2.approx.f32!",
    "f>f: tanh.approx.f32!",
};

// Whole bodies for what has several results or other operands: name, classes > result, body.
struct Body {
  const char* form;
  const char* body;
};
const Body kBodies[] = {
    {"rrr>r: lop3 96", "lop3.b32 %x0, %x1, %x2, %x3, 0x96;"},
    {"rrr>r: lop3 e8", "lop3.b32 %x0, %x1, %x2, %x3, 0xe8;"},
    {"rrr>r: lop3 1b", "lop3.b32 %x0, %x1, %x2, %x3, 0x1b;"},
    {"rrr>R: lop3 predicate",
     "setp.eq.s32 %p1, %x1, %x2; lop3.and.b32 %r20|%p2, %x1, %x2, %x3, 0x80, %p1; selp.u32 %r21, 1, 0, %p2;"
     "mov.b64 %x0, {%r20, %r21};"},
    {"rrrr>R: carries", "add.cc.u32 %r20, %x1, %x2; addc.u32 %r21, %x3, %x4; mov.b64 %x0, {%r20, %r21};"},
    {"rrrr>R: borrows",
     "sub.cc.u32 %r20, %x1, %x2; subc.cc.u32 %r21, %x3, %x4; subc.u32 %r21, %r21, 0;"
     "mov.b64 %x0, {%r20, %r21};"},
    {"rrrr>R: products with carry",
     "mad.lo.cc.u32 %r20, %x1, %x2, %x3; madc.hi.u32 %r21, %x1, %x2, %x4;"
     "mov.b64 %x0, {%r20, %r21};"},
    {"RRR>R: wide products with carry",
     "mad.lo.cc.u64 %rd20, %x1, %x2, %x3; madc.hi.u64 %x0, %x1, %x2, %x3;"},
    {"rnn>r: fns",
     "and.b32 %r20, %x2, 31; and.b32 %r21, %x3, 7; sub.s32 %r21, %r21, 3; fns.b32 %x0, %x1, %r20, %r21;"},
    {"ff>r: setp",
     "mov.u32 %x0, 0;"
     "setp.eq.f32 %p1, %x1, %x2; @%p1 or.b32 %x0, %x0, 1; setp.ne.f32 %p1, %x1, %x2; @%p1 or.b32 %x0, %x0, 2;"
     "setp.lt.f32 %p1, %x1, %x2; @%p1 or.b32 %x0, %x0, 4; setp.le.f32 %p1, %x1, %x2; @%p1 or.b32 %x0, %x0, 8;"
     "setp.gt.f32 %p1, %x1, %x2; @%p1 or.b32 %x0, %x0, 16; setp.ge.f32 %p1, %x1, %x2; @%p1 or.b32 %x0, %x0, "
     "32;"
     "setp.equ.f32 %p1, %x1, %x2; @%p1 or.b32 %x0, %x0, 64; setp.neu.f32 %p1, %x1, %x2; @!%p1 or.b32 %x0, "
     "%x0, 128;"
     "setp.ltu.f32 %p1, %x1, %x2; @%p1 or.b32 %x0, %x0, 256; setp.leu.f32 %p1, %x1, %x2; @%p1 or.b32 %x0, "
     "%x0, 512;"
     "setp.gtu.f32 %p1, %x1, %x2; @%p1 or.b32 %x0, %x0, 1024; setp.geu.f32 %p1, %x1, %x2; @%p1 or.b32 %x0, "
     "%x0, 2048;"
     "setp.num.f32 %p1, %x1, %x2; @%p1 or.b32 %x0, %x0, 4096; setp.nan.f32 %p1, %x1, %x2; @%p1 or.b32 %x0, "
     "%x0, 8192;"},
    {"ff>r: setp ftz pair",
     "setp.gt.and.ftz.f32 %p1|%p2, %x1, %x2, %p0; selp.u32 %r20, 1, 0, %p1; selp.u32 %r21, 2, 0, %p2;"
     "or.b32 %x0, %r20, %r21;"},
    {"rr>r: setp integers",
     "setp.lo.u32 %p1, %x1, %x2; setp.ls.or.u32 %p2|%p3, %x1, %x2, !%p1; setp.ge.xor.s32 %p4, %x1, %x2, %p2;"
     "selp.u32 %r20, 1, 0, %p2; selp.u32 %r21, 2, 0, %p3; or.b32 %r20, %r20, %r21;"
     "selp.u32 %r21, 4, 0, %p4; or.b32 %x0, %r20, %r21;"},
    {"HH>r: setp halves",
     "setp.lt.f16x2 %p1|%p2, %x1, %x2; selp.u32 %r20, 1, 0, %p1; selp.u32 %r21, 2, 0, %p2; or.b32 %x0, %r20, "
     "%r21;"},
    {"f>r: testp",
     "mov.u32 %x0, 0; testp.finite.f32 %p1, %x1; @%p1 or.b32 %x0, %x0, 1; testp.infinite.f32 %p1, %x1; @%p1 "
     "or.b32 %x0, %x0, 2;"
     "testp.number.f32 %p1, %x1; @%p1 or.b32 %x0, %x0, 4; testp.notanumber.f32 %p1, %x1; @%p1 or.b32 %x0, "
     "%x0, 8;"
     "testp.normal.f32 %p1, %x1; @%p1 or.b32 %x0, %x0, 16; testp.subnormal.f32 %p1, %x1; @%p1 or.b32 %x0, "
     "%x0, 32;"},
    {"F>r: testp f64",
     "mov.u32 %x0, 0; testp.finite.f64 %p1, %x1; @%p1 or.b32 %x0, %x0, 1; testp.normal.f64 %p1, %x1; @%p1 "
     "or.b32 %x0, %x0, 16;"
     "testp.subnormal.f64 %p1, %x1; @%p1 or.b32 %x0, %x0, 32;"},
};

const uint32_t kFloats[] = {
    0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000,
    0x80800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x3F000000, 0xBF000000,
    0x3FC00000, 0x40200000, 0x4B000001, 0x4EFFFFFF, 0x4F000000, 0xCF000000, 0x4F7FFFFF, 0x4F800000,
    0x5EFFFFFF, 0x5F000000, 0xDF000000, 0x3DCCCCCD, 0x33800000, 0x477FF000, 0x477FEFFF, 0x387FE000};
const uint64_t kDoubles[] = {0x0000000000000000, 0x8000000000000000, 0x3FF0000000000000, 0xBFF0000000000000,
                             0x0000000000000001, 0x8000000000000001, 0x000FFFFFFFFFFFFF, 0x0010000000000000,
                             0x7FEFFFFFFFFFFFFF, 0xFFEFFFFFFFFFFFFF, 0x7FF0000000000000, 0xFFF0000000000000,
                             0x7FF8000000000000, 0x3FE0000000000000, 0xBFE0000000000000, 0x3FF8000000000000,
                             0x4004000000000000, 0x41DFFFFFFFC00000, 0x41E0000000000000, 0xC1E0000000200000,
                             0x41EFFFFFFFE00000, 0x43E0000000000000, 0xC3E0000000000000, 0x43F0000000000000,
                             0x3FB999999999999A, 0x47EFFFFFF0000000, 0x36A0000000000000, 0x3690000000000001,
                             0x380FFFFFE0000000, 0x40EFFC0000000000, 0x3E60000000000000, 0x3FF0000010000000};
const uint32_t kIntegers[] = {
    0,          1,          2,          3,          7,          31,         32,         33,
    63,         64,         127,        128,        255,        256,        0x7FFF,     0x8000,
    0xFFFF,     0x10000,    0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFF80,
    0xFFFF8000, 0x55555555, 0xAAAAAAAA, 0x12345678, 0xDEADBEEF, 0x00FF00FF, 0x01000000, 0x80808080};
const uint16_t kHalves[] = {0x0000, 0x8000, 0x3C00, 0xBC00, 0x0001, 0x8001, 0x03FF, 0x0400,
                            0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x3800, 0x3E00, 0x4100,
                            0x3C01, 0x6BFF, 0x6C00, 0x7800, 0x1000, 0x0401, 0x57FF, 0x5800,
                            0x77FF, 0x2E66, 0xB800, 0x3555, 0x8400, 0x5BF8, 0x7BFE, 0x0200};
const uint16_t kBfloats[] = {0x0000, 0x8000, 0x3F80, 0xBF80, 0x0001, 0x8001, 0x007F, 0x0080,
                             0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0x3F00, 0x3FC0, 0x4020,
                             0x3F81, 0x4F00, 0xCF00, 0x4F7F, 0x5F00, 0x3B80, 0x3380, 0x4B00,
                             0x0100, 0x3DCD, 0xBF00, 0x3EAB, 0x8080, 0x42FE, 0x7F7E, 0x0040};

uint64_t valueOf(char kind, uint32_t index, std::mt19937_64& random) {
  uint64_t any = random();
  bool edge = index < 32;
  switch (kind) {
    case 'f':
      return edge             ? kFloats[index]
             : (any & 1) != 0 ? static_cast<uint32_t>(any >> 32)
                              : 0x3C000000u + static_cast<uint32_t>(any >> 37);
    case 'F':
      return edge ? kDoubles[index] : (any & 1) != 0 ? random() : 0x3F00000000000000u + (random() >> 7);
    case 'r':
      return edge ? kIntegers[index] : static_cast<uint32_t>(any >> (any & 31));
    case 'R':
      return edge ? static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(kIntegers[index])))
                  : random() >> (any & 63);
    case 's':
      return edge ? kIntegers[index] & 0xFFFF : any & 0xFFFF;
    case 'h':
      return edge ? kHalves[index] : any & 0xFFFF;
    case 'g':
      return edge ? kBfloats[index] : any & 0xFFFF;
    case 'H':
      return (edge ? kHalves[index] : any & 0xFFFF) | (kHalves[(any >> 16) & 31] << 16);
    case 'G':
      return (edge ? kBfloats[index] : any & 0xFFFF) | (kBfloats[(any >> 16) & 31] << 16);
    case 'n':
      return edge ? index * 3 : (any & 7) != 0 ? any & 127 : static_cast<uint32_t>(any >> 16);
    default:
      return any & 0xFFFF;
  }
}

std::vector<Input> inputsOf(const std::string& classes) {
  std::mt19937_64 random(classes[0] * 1000u + classes.size());
  std::vector<Input> result;
  auto at = [&](size_t i, uint32_t index) {
    return i < classes.size() ? valueOf(classes[i], index, random) : 0;
  };
  for (uint32_t i = 0; i < kCaseThreads; ++i) {
    // Two operands meet every edge of one with half the edges of the other; the rest is random.
    uint32_t first = i < 512 || classes.size() == 1 ? i % 32 + (classes.size() == 1 && i >= 32 ? 32 : 0) : 99;
    uint32_t second = i < 512 ? (i / 32) * 2 : 99;
    uint32_t third = static_cast<uint32_t>(random() % 48);
    uint32_t fourth = static_cast<uint32_t>(random() % 48);
    Input one{};
    one.a = at(0, first);
    one.b = at(1, second);
    one.c = at(2, third);
    one.d = at(3, fourth);
    result.push_back(one);
  }
  return result;
}

const char* prefixOf(char kind) {
  switch (kind) {
    case 'f':
      return "%f";
    case 'F':
      return "%fd";
    case 'R':
      return "%rd";
    case 's':
    case 'h':
    case 'g':
      return "%rs";
    default:
      return "%r";
  }
}
const char* typeOf(char kind) {
  switch (kind) {
    case 'f':
      return "f32";
    case 'F':
      return "f64";
    case 'R':
      return "u64";
    case 's':
    case 'h':
    case 'g':
      return "u16";
    default:
      return "u32";
  }
}

std::string moduleOf(const std::string& classes, char result, std::string body) {
  for (size_t at; (at = body.find("%x")) != std::string::npos;) {
    size_t number = static_cast<size_t>(body[at + 2] - '0');
    char kind = number == 0 ? result : classes[number - 1];
    body.replace(at, 2, prefixOf(kind));
  }
  std::string loads;
  for (size_t i = 0; i < classes.size(); ++i)
    loads += std::string("ld.global.") + typeOf(classes[i]) + " " + prefixOf(classes[i]) +
             std::to_string(i + 1) + ", [%src+" + std::to_string(i * 8) + "];\n";
  return std::string(
             ".version 8.3\n.target sm_90\n.address_size 64\n"
             ".visible .entry test(.param .u64 in, .param .u64 out)\n{\n"
             ".reg .pred %p<8>; .reg .b16 %rs<32>; .reg .b32 %r<32>; .reg .b64 %rd<32>; .reg .f32 %f<32>;\n"
             ".reg .f64 %fd<32>; .reg .b64 %src, %dst; .reg .b32 %i;\n"
             "ld.param.u64 %src, [in]; ld.param.u64 %dst, [out]; mov.u32 %i, %tid.x;\n"
             "mad.wide.u32 %src, %i, 32, %src; mad.wide.u32 %dst, %i, 8, %dst; setp.ne.u32 %p0, %i, 5;\n") +
         loads + body + "\nst.global." + typeOf(result) + " [%dst], " + prefixOf(result) + "0;\nret;\n}\n";
}

InstructionCase makeCase(const std::string& form, std::string body) {
  size_t arrow = form.find('>');
  std::string classes = form.substr(0, arrow);
  InstructionCase one;
  one.result = form[arrow + 1];
  one.name = form.substr(form.find(": ") + 2);
  one.inputs = inputsOf(classes);
  if (body.empty()) {
    std::string opcode = one.name;
    if (opcode.back() == '!') opcode.pop_back();
    body = opcode + " %x0";
    for (size_t i = 0; i < classes.size(); ++i) body += ", %x" + std::to_string(i + 1);
    body += ";";
  }
  one.ptx = moduleOf(classes, one.result, body);
  return one;
}

}  // namespace

std::vector<InstructionCase> instructionCases() {
  std::vector<InstructionCase> cases;
  for (const char* form : kForms) {
    std::string text = form;
    if (text.back() != '!') cases.push_back(makeCase(text, ""));
  }
  for (const Body& body : kBodies) cases.push_back(makeCase(body.form, body.body));
  return cases;
}

uint64_t hashResults(const InstructionCase& one, std::vector<uint64_t>& results) {
  uint64_t hash = 0xcbf29ce484222325;
  auto isNan16 = [](uint64_t bits, uint64_t infinity) { return (bits & 0x7FFF) > infinity; };
  for (uint64_t& value : results) {
    switch (one.result) {
      case 'f':
        if ((value & 0x7FFFFFFF) > 0x7F800000) value = 0x7FFFFFFF;
        break;
      case 'F':
        if ((value & 0x7FFFFFFFFFFFFFFF) > 0x7FF0000000000000) value = 0x7FFFFFFFFFFFFFFF;
        break;
      case 'h':
        if (isNan16(value, 0x7C00)) value = 0x7FFF;
        break;
      case 'g':
        if (isNan16(value, 0x7F80)) value = 0x7FFF;
        break;
      case 'H':
      case 'G': {
        uint64_t infinity = one.result == 'H' ? 0x7C00 : 0x7F80;
        if (isNan16(value, infinity)) value = (value & 0xFFFF0000) | 0x7FFF;
        if (isNan16(value >> 16, infinity)) value = (value & 0xFFFF) | 0x7FFF0000;
        break;
      }
      default:
        break;
    }
    for (unsigned i = 0; i < 8; ++i) hash = (hash ^ ((value >> (8 * i)) & 255)) * 0x100000001b3;
  }
  return hash;
}

}  // namespace gpupool::softgpu::test
