// Runs a tuned model from C++ with TVM's runtime alone: no Python, no compiler.
//
//   run_model BUILD INPUT... OUTPUT...
//
// BUILD is the folder that `fusion tune` wrote (of several input shapes that of one: build/1x3x224x224), INPUT a file
// with the values of each input of the model in its order, OUTPUT a file to write for each output: raw numbers in C
// order, as NumPy's `tofile` and `fromfile` have them. How to compile it: docs/tutorials/fuse-and-deploy.md. Threads: the
// environment variable TVM_NUM_THREADS; default: as many as the model was tuned for.

#include <tuned_model.h>

#include <chrono>
#include <iostream>

constexpr int kRuns = 20;

void Read(const std::string& path, const fusion::Array& array) {
  std::ifstream file(path, std::ios::binary);
  file.read(static_cast<char*>(array.raw()), static_cast<std::streamsize>(array.bytes()));
  if (static_cast<size_t>(file.gcount()) != array.bytes() || file.peek() != std::ifstream::traits_type::eof()) {
    throw fusion::Error(path + ": cannot be read, or does not hold " + std::to_string(array.size()) + " " +
                        array.dtype());
  }
}

void Write(const std::string& path, const fusion::Array& array) {
  std::ofstream file(path, std::ios::binary);
  file.write(static_cast<const char*>(array.raw()), static_cast<std::streamsize>(array.bytes()));
  file.close();
  if (!file) throw fusion::Error(path + ": cannot be written");
}

void Run(const std::string& build, const std::vector<std::string>& files) {
  const fusion::TunedModel model(build);
  if (files.size() != model.inputs().size() + model.outputs().size()) {
    std::string wanted;
    for (const auto& each : model.inputs()) wanted += "\n  input " + each.text();
    for (const auto& each : model.outputs()) wanted += "\n  output " + each.text();
    throw fusion::Error(build + ": " + std::to_string(files.size()) + " files are given; name one for each:" + wanted);
  }
  std::vector<fusion::Array> inputs;
  for (const auto& each : model.inputs()) {
    inputs.push_back(each.zeros());
    Read(files[inputs.size() - 1], inputs.back());
  }
  std::vector<fusion::Array> outputs = model.run(inputs);
  std::vector<double> milliseconds;
  for (int run = 0; run < kRuns; ++run) {
    const auto start = std::chrono::steady_clock::now();
    outputs = model.run(inputs);
    milliseconds.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }
  for (size_t index = 0; index < outputs.size(); ++index) {
    const std::string& path = files[inputs.size() + index];
    Write(path, outputs[index]);
    std::cout << outputs[index].size() << " " << outputs[index].dtype() << " written to " << path << "\n";
  }
  std::sort(milliseconds.begin(), milliseconds.end());
  std::cout << "median of " << kRuns << " runs: " << milliseconds[milliseconds.size() / 2] << " ms\n";
}

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: run_model BUILD INPUT... OUTPUT...\n";
    return 2;
  }
  try {
    Run(argv[1], {argv + 2, argv + argc});
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
