// The page in a tab: its data is inside the document.

const inside = JSON.parse(document.getElementById("data").textContent);
new App(document.getElementById("explorer"), inside, new Tab()).start();
