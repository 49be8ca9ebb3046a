// Execution (Execution Control, Occupancy).
// Rows: see schema/rows.h. No include guard: included once per meaning of CALL.
// clang-format off
CALL(cuLaunchKernel, Custom, Handle<"f">, In<"gridDimX">, In<"gridDimY">, In<"gridDimZ">, In<"blockDimX">, In<"blockDimY">, In<"blockDimZ">, In<"sharedMemBytes">, Handle<"hStream">, Unused<"kernelParams">, Unused<"extra">)
CALL(cuLaunchKernelEx, Custom, Struct<"config">, Handle<"f">, Unused<"kernelParams">, Unused<"extra">)
CALL(cuLaunchCooperativeKernel, Custom, Handle<"f">, In<"gridDimX">, In<"gridDimY">, In<"gridDimZ">, In<"blockDimX">, In<"blockDimY">, In<"blockDimZ">, In<"sharedMemBytes">, Handle<"hStream">, Unused<"kernelParams">)
CALL(cuOccupancyMaxActiveBlocksPerMultiprocessor, Custom, Out<"numBlocks">, Handle<"func">, In<"blockSize">, In<"dynamicSMemSize">)
CALL(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, Custom, Out<"numBlocks">, Handle<"func">, In<"blockSize">, In<"dynamicSMemSize">, In<"flags">)
CALL(cuOccupancyMaxPotentialBlockSize, Custom, Out<"minGridSize">, Out<"blockSize">, Handle<"func">, Unused<"blockSizeToDynamicSMemSize">, In<"dynamicSMemSize">, In<"blockSizeLimit">)
CALL(cuOccupancyMaxPotentialBlockSizeWithFlags, Custom, Out<"minGridSize">, Out<"blockSize">, Handle<"func">, Unused<"blockSizeToDynamicSMemSize">, In<"dynamicSMemSize">, In<"blockSizeLimit">, In<"flags">)
CALL(cuOccupancyAvailableDynamicSMemPerBlock, Custom, Out<"dynamicSmemSize">, Handle<"func">, In<"numBlocks">, In<"blockSize">)
CALL(cuOccupancyMaxPotentialClusterSize, Custom, Out<"clusterSize">, Handle<"func">, Struct<"config">)
CALL(cuOccupancyMaxActiveClusters, Custom, Out<"numClusters">, Handle<"func">, Struct<"config">)
// clang-format on
