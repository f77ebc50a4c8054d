#pragma once

#include <string>

namespace bulkhead::test {

/// The fleet file of the GPU tests. Its model files are made by make_models.py, which says what
/// each shows. `graphs` and further keys are given by the test; every model is declared so that
/// make_models.py's shapes fit.
///
///   mlp, mlp-package    x float32 [1..32, 64] -> y float32 [1..32, 10]; buckets 1, 8, 32;
///                       rows padded with 0
///   tokens              ids, mask int64 [1, n=1..256] -> mean [1, 32], each [1, n, 32];
///                       buckets 16, 64, 256
///   echo                x float32 [1..67108864] -> y of the same; buckets 1024 and 33554432
///   scale_out           x float32 [1..4096], factor [1] -> y, z of x's length, which it takes as
///                       arguments; buckets 1024 and 77
///   noise               x float32 [16] -> y: x plus normal noise
///   host_read, cpu_born, rebinds, host_read_noise   x float32 [16] -> y [16]; none can be captured
///   slow                x float32 [2048, 2048] -> y: many products, half a second or more
///   heavy               x float32 [16] -> y [16]; 2 GiB of weights
[[nodiscard]] std::string gpu_fleet(const std::string& model, const std::string& extra = "graphs: required\n");

[[nodiscard]] std::string gpu_model_folder();

}  // namespace bulkhead::test
