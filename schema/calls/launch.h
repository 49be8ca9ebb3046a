// Execution (Execution Control, Occupancy).
// Rows: see schema/rows.h. No include guard: included once per meaning of CALL.
// clang-format off
CALL(cuLaunchKernel, Policy, None)
CALL(cuLaunchKernelEx, Policy, None)
CALL(cuLaunchCooperativeKernel, Policy, None)
CALL(cuOccupancyMaxActiveBlocksPerMultiprocessor, Policy, None)
CALL(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, Policy, Generated | Loads, Out<"numBlocks">, Handle<"func">, In<"blockSize">, In<"dynamicSMemSize">, In<"flags">)
CALL(cuOccupancyMaxPotentialBlockSize, Policy, None)
CALL(cuOccupancyMaxPotentialBlockSizeWithFlags, Policy, None)
CALL(cuOccupancyAvailableDynamicSMemPerBlock, Policy, Generated | Loads, Out<"dynamicSmemSize">, Handle<"func">, In<"numBlocks">, In<"blockSize">)
CALL(cuOccupancyMaxPotentialClusterSize, Policy, None)
CALL(cuOccupancyMaxActiveClusters, Policy, None)
// clang-format on
