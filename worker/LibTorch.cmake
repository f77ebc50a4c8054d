# LibTorch out of the `torch` wheel, as two targets: `torch_cpu_only` (0.2 s, 120 MB in a process)
# and `torch_cuda_all` (0.36 s, 475 MB) for the CUDA module. Torch's own package file is not used:
# under C++20 and CMake 3.25 it stops at an unknown CUDA dialect, and it links all of LibTorch to
# every user.
set(OPENSSL_USE_STATIC_LIBS TRUE)  # a venv with torch has none, and a machine another one
find_package(OpenSSL REQUIRED)

set(BULKHEAD_PYTHON ${PROJECT_BINARY_DIR}/venv/bin/python CACHE FILEPATH "Python whose torch is used")
if(NOT BULKHEAD_TORCH_DIR)
    execute_process(
        COMMAND ${BULKHEAD_PYTHON} -c "import importlib.util as u, os; print(os.path.dirname(u.find_spec('torch').origin))"
        OUTPUT_VARIABLE torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE torch_missing)
    if(torch_missing)
        message(FATAL_ERROR "no torch in ${BULKHEAD_PYTHON}; run ./scripts/install, or pass -DBULKHEAD_PYTHON= or -DBULKHEAD_TORCH_DIR=")
    endif()
    set(BULKHEAD_TORCH_DIR ${torch_dir} CACHE PATH "Folder of the torch package")
endif()
message(STATUS "LibTorch: ${BULKHEAD_TORCH_DIR}")

add_library(torch_cpu_only INTERFACE)
# After the system's own headers: the wheel brings an {fmt} 12 whose compiled part it does not
# export, and which the system's spdlog does not understand.
target_compile_options(torch_cpu_only INTERFACE
    "SHELL:-idirafter ${BULKHEAD_TORCH_DIR}/include"
    "SHELL:-idirafter ${BULKHEAD_TORCH_DIR}/include/torch/csrc/api/include")
target_link_directories(torch_cpu_only INTERFACE ${BULKHEAD_TORCH_DIR}/lib)
target_link_libraries(torch_cpu_only INTERFACE torch_cpu c10)
target_link_options(torch_cpu_only INTERFACE -Wl,-rpath,${BULKHEAD_TORCH_DIR}/lib)

add_library(torch_cuda_all INTERFACE)
target_link_libraries(torch_cuda_all INTERFACE torch_cpu_only torch_cuda c10_cuda)
