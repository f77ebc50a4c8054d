#include "tests/gpu/models.h"

#include <map>
#include <sstream>

#include <gtest/gtest.h>

#include "tests/support/build_folder.h"

namespace bulkhead::test {
namespace {

// The rest of each declaration, one key a line; of 16 floats to 16 where none is here.
const std::map<std::string, std::string> declarations{
    {"mlp", R"(runtime: torchscript
file: mlp.pt
inputs: {x: {dtype: float32, shape: [1..32, 64]}}
outputs: {y: {dtype: float32, shape: [1..32, 10]}}
buckets: [{x: [1, 64]}, {x: [8, 64]}, {x: [32, 64]}]
padding: {x: 0}
)"},
    {"mlp-package", R"(runtime: aoti
package: mlp.pt2
inputs: {x: {dtype: float32, shape: [1..32, 64]}}
outputs: {y: {dtype: float32, shape: [1..32, 10]}}
buckets: [{x: [2, 64]}, {x: [8, 64]}, {x: [32, 64]}]
padding: {x: 0}
warmup: {x: [2, 64]}
)"},
    {"tokens", R"(runtime: torchscript
file: tokens.pt
inputs: {ids: {dtype: int64, shape: [1, n=1..256]}, mask: {dtype: int64, shape: [1, n=1..256]}}
outputs: {mean: {dtype: float32, shape: [1, 32]}, each: {dtype: float32, shape: [1, n=1..256, 32]}}
buckets: [{ids: [1, 16], mask: [1, 16]}, {ids: [1, 64], mask: [1, 64]}, {ids: [1, 256], mask: [1, 256]}]
padding: {ids: 0, mask: 0}
)"},
    {"echo", R"(runtime: torchscript
file: echo.pt
inputs: {x: {dtype: float32, shape: [1..67108864]}}
outputs: {y: {dtype: float32, shape: [1..67108864]}}
buckets: [{x: [1024]}, {x: [33554432]}]
)"},
    {"scale_out", R"(runtime: torchscript
file: scale_out.pt
inputs: {x: {dtype: float32, shape: [n=1..4096]}, factor: {dtype: float32, shape: [1]}}
outputs: {y: {dtype: float32, shape: [n=1..4096], out: true}, z: {dtype: float32, shape: [n=1..4096], out: true}}
buckets: [{x: [1024], factor: [1]}, {x: [77], factor: [1]}]
)"},
    {"slow", R"(runtime: torchscript
file: slow.pt
channel: {input: 32MiB, output: 32MiB}
inputs: {x: {dtype: float32, shape: [2048, 2048]}}
outputs: {y: {dtype: float32, shape: [2048, 2048]}}
)"},
};

std::string declaration(const std::string& model) {
    if (const auto found = declarations.find(model); found != declarations.end()) return found->second;
    return "runtime: torchscript\nfile: " + model +
           ".pt\ninputs: {x: {dtype: float32, shape: [16]}}\noutputs: {y: {dtype: float32, shape: [16]}}\n";
}

}  // namespace

std::string gpu_model_folder() { return (build_folder() / "gpu-models").string(); }

std::string gpu_fleet(const std::string& model, const std::string& extra) {
    std::string yaml = "version: 1\ndefaults: {device: \"cuda:0\", restart: never}\nmodels:\n  " + model + ":\n";
    std::istringstream lines{declaration(model) + extra};
    for (std::string line; std::getline(lines, line);) {
        for (const std::string key : {"file: ", "package: "})
            if (line.starts_with(key)) line.insert(key.size(), gpu_model_folder() + "/");
        yaml += "    " + line + "\n";
    }
    return yaml;
}

}  // namespace bulkhead::test
