# The end-to-end programs: ordinary CUDA programs, built by plain nvcc, that check themselves and print the same report
# on every device. Each includer defines gpupool_program(name ...) first and gets one call per program:
#   SOURCES    its files in this folder (default: name.cu)
#   FLAGS      nvcc flags beyond -std=c++17
#   FILES      files made beside it, as file=source;flags (see driver_only)
#   ARGUMENTS  its arguments in the tests
#   STATUS     its exit status (default 0)
#   TIMEOUT    seconds a run may take on a software GPU (default 60)
#   NEEDS      what building or running it takes: driver (libcuda to link against), nvrtc, shared_runtime,
#              or two_devices
# Its standard output is compared with ../expected/name.txt.

# The classics.
gpupool_program(upload_order)
gpupool_program(vector_add)
gpupool_program(matmul)
gpupool_program(reduction)
gpupool_program(scan)
gpupool_program(histogram)
gpupool_program(transpose)
gpupool_program(bitonic_sort)
gpupool_program(nbody)
gpupool_program(black_scholes)
gpupool_program(fft)
gpupool_program(stencil)
gpupool_program(sparse_matvec)
gpupool_program(monte_carlo_pi)

# Memory of every kind.
gpupool_program(symbols)
gpupool_program(managed_memory)
gpupool_program(managed_ranges FLAGS -lcuda NEEDS driver)
gpupool_program(mapped_memory)
gpupool_program(registered_copies TIMEOUT 120)
gpupool_program(memory_pools)
gpupool_program(pitched_copies)
gpupool_program(textures)
gpupool_program(virtual_memory SOURCES virtual_memory.cpp FLAGS -cudart none -lcuda NEEDS driver)
gpupool_program(memset_attributes FLAGS -lcuda NEEDS driver)
gpupool_program(fresh_memory)
gpupool_program(copy_sizes TIMEOUT 120)
gpupool_program(pinned_again)
gpupool_program(stress_allocations TIMEOUT 120)

# Streams, events, callbacks, graphs.
gpupool_program(async_copies)
gpupool_program(event_again)
gpupool_program(host_callbacks)
gpupool_program(host_function_asks FLAGS -lcuda NEEDS driver)
gpupool_program(graph_capture)
gpupool_program(graph_manual)
gpupool_program(graph_nodes SOURCES graph_nodes.cpp FLAGS -cudart none -lcuda NEEDS driver)
gpupool_program(graph_conditional)
gpupool_program(graph_kernel_params FLAGS -lcuda NEEDS driver)
gpupool_program(graph_inner SOURCES graph_inner.cpp FLAGS -cudart none -lcuda NEEDS driver)
gpupool_program(capture_modes)
gpupool_program(per_thread_stream FLAGS --default-stream per-thread)
gpupool_program(deep_queue TIMEOUT 120)
gpupool_program(stress_threads TIMEOUT 120)
gpupool_program(stress_mixed ARGUMENTS --threads 4 FLAGS -lcuda TIMEOUT 120 NEEDS driver)

# Code: how it is built, loaded, linked, called.
gpupool_program(function_pointers)
gpupool_program(big_parameters)
gpupool_program(separate SOURCES separate_main.cu separate_device.cu FLAGS -rdc=true)
gpupool_program(shared_runtime FLAGS -cudart shared NEEDS shared_runtime)
gpupool_program(nvrtc FLAGS -lnvrtc -lcuda NEEDS nvrtc driver)
gpupool_program(ptx_link FLAGS -lcuda NEEDS driver)
gpupool_program(driver_only SOURCES driver_only.cpp FLAGS -cudart none -lcuda NEEDS driver
  FILES "driver_kernels.fatbin=driver_kernels.cu -fatbin" "driver_kernels.ptx=driver_kernels.cu -ptx")
gpupool_program(large_module SOURCES large_module.cpp FLAGS -cudart none -lcuda NEEDS driver)
gpupool_program(contexts FLAGS -lcuda NEEDS driver)
gpupool_program(two_devices)
gpupool_program(two_devices_traffic TIMEOUT 120)
gpupool_program(functions_on_two FLAGS -lcuda NEEDS driver)
gpupool_program(visible_devices FLAGS -lcuda NEEDS driver TIMEOUT 120)
gpupool_program(function_attributes)
gpupool_program(launch_fallback)

# What kernels can do.
gpupool_program(cooperative_groups)
gpupool_program(warp_votes)
gpupool_program(integer_intrinsics)
gpupool_program(rounding_intrinsics FLAGS -Xcompiler -frounding-math)
gpupool_program(math_functions)
gpupool_program(half_precision)
gpupool_program(bfloat16 FLAGS -arch=sm_80)
gpupool_program(device_printf)
gpupool_program(printf_order)
gpupool_program(device_malloc)

# How things go wrong, and end.
gpupool_program(errors)
gpupool_program(first_error)
gpupool_program(out_of_memory)
gpupool_program(illegal_address)
gpupool_program(device_assert)
gpupool_program(trap)
gpupool_program(device_reset)
gpupool_program(reset_beside FLAGS -lcuda NEEDS driver TIMEOUT 120)
gpupool_program(reset_after_fault)
gpupool_program(hold_memory)
gpupool_program(fork_before)
gpupool_program(fork_after)
